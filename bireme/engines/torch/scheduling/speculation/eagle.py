"""Drafts of an EAGLE-3 head: what the model made of each token says which ones it would say next.

What the model made of a step's tokens is kept until a draft is wanted. The head's pass over all that was kept writes
keys and values of each place that was verified, into the model's blocks, and has at the end of a sequence what its
first drafted token is drawn from. Further ones take a pass each, in which the head's own rows stand in for the model's;
the next pass over what was kept writes these places anew. Where no draft is wanted there is no pass.

Of tokens that the model has not computed for this request the head knows what blocks have of an earlier one, on the
device or from a lower tier (`BlockPool.is_seen`). It also knows what came by transfer from an engine that has it. Where
any of these lack its rows, it sees the sequence from the next block on: drafts are worse, and no token is another.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bireme.engines.base import RequestKey
from bireme.engines.torch.forward.eagle_passes import EaglePasses
from bireme.engines.torch.scheduling.speculation.drafter import PassCosts, drafting_of
from bireme.engines.torch.scheduling.speculation.followers import GROUP, SeenBlocks, follow
from bireme.engines.torch.scheduling.step_costs import StepWork
from bireme.engines.torch.step import Draft, DraftedSequence, DrawnDraft, SchedulerOutput, SequenceStatus
from bireme.engines.torch.step import Sequence as OpenSequence
from bireme.kv.blocks.block_pool import BlockPool
from bireme.logits.sampler import NO_TOKEN, Sampler

StepPlace = tuple[OpenSequence, int, list[int]]  # its first place in a step, its rows there


class EagleDrafter:
    """Used by the engine's thread, between the model's steps."""

    num_kinds = 1

    def __init__(
        self,
        passes: EaglePasses,
        sampler: Sampler[RequestKey],
        pool: BlockPool,
        tokens_per_block: int,
        max_seq_len: int,
    ) -> None:
        self.costs = PassCosts(passes.device, has_rounds=passes.rounds is not None)
        self._passes, self._sampler, self._size, self._max_seq_len = passes, sampler, tokens_per_block, max_seq_len
        self._blocks = SeenBlocks(pool, tokens_per_block)

    def room(self, sequence: OpenSequence) -> int:
        """None where the rows of the last token's place are not there."""
        follower = sequence.drafting.follower if sequence.drafting is not None else None
        if follower is None or not follower.unseen:
            return 0
        is_whole = follower.num_verified + follower.num_unseen == len(sequence.tokens) - 1
        return self._max_seq_len - len(sequence.tokens) if is_whole else 0

    def observe(
        self, plan: SchedulerOutput, places: Sequence[StepPlace], is_in_places: bool, pays: bool = True
    ) -> float:
        """Keep what the model made of a step whose tokens have been delivered, until a draft is wanted.

        `places`: `places_of`, when the step began. `is_in_places`: the step itself has put its rows there. `pays`:
        drafts do; otherwise what is too much to keep is let go of.
        The head sees prompts at once, so that a cached prefix of theirs serves others. Nobody has to tell it of all
        steps: behind a gap it sees a sequence anew. Returns the seconds that its pass took.
        """
        used, prompts = self._used(places), {one for one, _ in plan.chunks}
        num_rows = sum(len(rows) for *_, rows in places)
        if self._passes.places is None:
            kept = used
        else:
            kept = {one: used[one] for one in used.keys() & prompts}
            self._place({one: used[one] for one in used.keys() - prompts}, None if is_in_places else num_rows)
        if kept:
            self._keep(plan, kept, self._passes.taps(num_rows))
        if not (seen := self._due(used, prompts, pays)):
            return 0.0
        began = self.costs.now()
        self._see({one: _follower_of(one) for one in seen}, dict.fromkeys(seen, 0))
        return float(self.costs.now() - began)

    def _used(self, places: Iterable[StepPlace]) -> dict[OpenSequence, list[int]]:
        """Return the rows of a step that the head has to see, of sequences that have some."""
        used = {}
        for sequence, first, rows in places:
            if _is_going_on(sequence, first):
                follower = self._advance(sequence, first)
                if own := rows[max(0, follower.num_verified - first) : sequence.computed - first]:
                    used[sequence] = own
        return used

    def _due(self, some: Iterable[OpenSequence], prompts: Container[OpenSequence], pays: bool) -> list[OpenSequence]:
        """Return those that the head is to see now, as far as a pass has room: prompts, and of whom too much is kept.

        Prompts first: their blocks serve others. What is too much and has no room is lost.
        """
        due, room = [], self._passes.most_rows

        def is_prompt(one: OpenSequence) -> bool:
            return one in prompts or one.request.request_type == "context_only"

        for sequence in sorted(some, key=is_prompt, reverse=True):
            count = _follower_of(sequence).num_unseen
            is_much = count > self._passes.most_unseen
            if (is_much and pays or is_prompt(sequence)) and room >= count:
                due.append(sequence)
                room -= count
            elif is_much:
                drafting_of(sequence).follower = None
        return due

    def _keep(self, plan: SchedulerOutput, used: Mapping[OpenSequence, list[int]], taps: list[Tensor]) -> None:
        """Add these rows of the step to what the head has not seen.

        A sequence's are held together with others'. So those of prompts, and of drafts, of which a step has many and
        which are mostly seen soon, are apart from those of sequences that may rest.
        """
        prompts = {one for one, _ in plan.chunks}
        if not plan.drafts and not plan.chunks:
            for one, (at,) in used.items():
                _follower_of(one).add(taps, slice(at, at + 1))
            return
        groups: dict[str, list[OpenSequence]] = {}
        for one in used:
            groups.setdefault("prompt" if one in prompts else "draft" if one in plan.drafts else "", []).append(one)
        for some in groups.values():
            index = torch.tensor([at for one in some for at in used[one]], device=self._passes.device)
            parts, begin = [part[index] for part in taps], 0
            for one in some:
                _follower_of(one).add(parts, slice(begin, begin := begin + len(used[one])))

    def _place(self, used: Mapping[OpenSequence, list[int]], num_rows: int | None) -> None:
        """Add these rows of the step, of sequences that decode, as they lie by place.

        `num_rows`: of the step, whose rows are to be put there; None: it has done that itself.
        """
        places = self._passes.places
        assert places is not None
        cells: list[int] = []
        for one, rows in used.items():
            follower = _follower_of(one)
            for own in places.slices(one.slot, follower.num_verified + follower.num_unseen, len(rows)):
                follower.add(places.parts, own)
                if num_rows is not None:
                    cells += range(own.start, own.stop)
        if num_rows is not None and cells:
            rows_of = [at for rows in used.values() for at in rows]
            to, index = torch.tensor([cells, rows_of], device=self._passes.device)
            for number, part in enumerate(self._passes.taps(num_rows)):
                places.put(number, to, part[index])

    def _advance(self, sequence: OpenSequence, first: int) -> DraftedSequence:
        """Return the sequence as the head has it, whose rows end before the place `first`."""
        drafting = drafting_of(sequence)
        follower = drafting.follower
        # Before the block that a head sees first nothing of it is kept, so nothing is missing either.
        if follower is None or (follower.num_verified + follower.num_unseen != first and first > follower.base):
            follower = drafting.follower = self._open(sequence, first)
        return follower

    def _open(self, sequence: OpenSequence, first: int) -> DraftedSequence:
        full, rest = divmod(first, self._size)
        has_all = not rest or first == drafting_of(sequence).num_seen
        if has_all and self._blocks.num_seen(sequence.table.blocks[GROUP], full) == full:
            full = rest = 0
        follower = follow(sequence, 1, self._sampler.vocab_size)
        follower.base = (full + bool(rest)) * self._size
        follower.num_verified = max(first, follower.base)
        return follower

    def propose(self, most: Mapping[OpenSequence, int], budget: int) -> dict[OpenSequence, Draft]:
        self.costs.begin()
        ready, left = {}, self._passes.most_rows
        for one in most:
            if left >= (follower := _follower_of(one)).num_unseen:
                ready[one], left = follower, left - follower.num_unseen
        if not ready:
            return {}
        at_once = self._at_once(ready)
        drafted: dict[OpenSequence, Sequence[int]] = {}
        if at_once:
            drafted |= self._draft_at_once(at_once, most)
        if others := {one: follower for one, follower in ready.items() if one not in at_once}:
            drafted |= self._draft_by_passes(others, most)
        return {one: Draft(tokens) for one, tokens in drafted.items() if tokens}

    def _at_once(self, ready: Mapping[OpenSequence, DraftedSequence]) -> dict[OpenSequence, DraftedSequence]:
        """Return those whose round is one launch: what is unseen lies by place, and nothing is edited.

        Where that is more than a round has rows for, all but the last place of whom it is long is seen before.
        """
        rounds, found = self._passes.rounds, dict[OpenSequence, DraftedSequence]()
        if rounds is None:
            return found
        for one, follower in ready.items():
            if self._is_simple(follower) and len(found) < rounds.most_sequences:
                found[one] = follower
        if sum(follower.num_unseen for follower in found.values()) > rounds.most_rows:
            most = rounds.most_rows // rounds.most_sequences
            self._catch_up({one: follower for one, follower in found.items() if follower.num_unseen > most})
        return found

    def _is_simple(self, follower: DraftedSequence) -> bool:
        assert self._passes.places is not None
        parts = self._passes.places.parts
        return not follower.row.is_always_edited and all(part is parts for part, _ in follower.unseen)

    def _catch_up(self, followers: Mapping[OpenSequence, DraftedSequence]) -> None:
        """Do a pass of all places that were kept but the last one of each. It is waited for: it is no step's time."""
        began, lasts = self.costs.now(), {}
        for one, follower in followers.items():
            parts, rows = follower.unseen.pop()
            if rows.stop - rows.start > 1:
                follower.unseen.append((parts, slice(rows.start, rows.stop - 1)))
            follower.num_unseen -= 1
            lasts[one] = parts, slice(rows.stop - 1, rows.stop)
        self._see(followers, dict.fromkeys(followers, 0))
        for one, follower in followers.items():
            follower.add(*lasts[one])
        if self._passes.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.costs.catch_up_s += self.costs.now() - began

    def _draft_at_once(
        self, followers: Mapping[OpenSequence, DraftedSequence], most: Mapping[OpenSequence, int]
    ) -> dict[OpenSequence, DrawnDraft]:
        """The step that verifies them is started while they are drawn, and takes the time of both."""
        rounds, began = self._passes.rounds, self.costs.now()
        assert rounds is not None
        for one, follower in followers.items():
            self._begin(one, follower, most[one])
            follower.row.go_to(one.num_output)
        drafted = rounds.draft([(follower, most[one]) for one, follower in followers.items()])
        if self.costs.at_once is not None and rounds.is_as_later:
            self.costs.launched(len(followers), self.costs.now() - began)
        for follower in followers.values():
            follower.own.computed += follower.num_unseen
            self._seen(follower)
        return dict(zip(followers, drafted, strict=True))

    def _draft_by_passes(
        self, ready: Mapping[OpenSequence, DraftedSequence], most: Mapping[OpenSequence, int]
    ) -> dict[OpenSequence, list[int]]:
        drafted: dict[OpenSequence, list[int]] = {one: [] for one in ready}
        began, work = self.costs.now(), self._see(ready, most)
        going = self._draw(ready, drafted)
        self.costs.passed(work, began)
        while going := {one: follower for one, follower in going.items() if len(drafted[one]) < most[one]}:
            began, work = self.costs.now(), self._go_on(going, drafted)
            going = self._draw(going, drafted)
            self.costs.passed(work, began)
        return drafted

    def _begin(self, one: OpenSequence, follower: DraftedSequence, most: int) -> None:
        """Have the head's sequence end with who follows its last unseen place; `most` tokens are to be drafted."""
        own = follower.own
        own.computed = follower.num_verified - follower.base
        del own.tokens[own.computed :]  # what was drafted
        first, end = (follower.base + 1 + count for count in (len(own.tokens), own.computed + follower.num_unseen))
        own.tokens += one.tokens[first:end]
        own.table.blocks[0] = one.table.blocks[GROUP][follower.base // self._size :]
        self._blocks.forget(own.table.blocks[0], own.computed, len(own.tokens) + most)

    def _seen(self, follower: DraftedSequence) -> None:
        """All that was kept of it has been computed."""
        own, first, follower.unseen, follower.num_unseen = follower.own, follower.num_verified, [], 0
        follower.num_verified = follower.base + own.computed
        if not follower.base:
            self._blocks.remember(own.table.blocks[0], first, own.computed)

    def _see(self, followers: Mapping[OpenSequence, DraftedSequence], most: Mapping[OpenSequence, int]) -> StepWork:
        """Do the pass of all places that were kept; drafts of `most` tokens are to follow."""
        plan = SchedulerOutput()
        for one, follower in followers.items():
            self._begin(one, follower, most[one])
            if (own := follower.own).num_pending == 1:
                plan.decodes.append(own)
            else:
                plan.chunks.append((own, own.num_pending))
        by_own = {follower.own: follower for follower in followers.values()}
        work = StepWork.of(plan)
        self._compute(plan, by_own, self._passes.fused([part for own in plan.sequences for part in by_own[own].unseen]))
        for follower in followers.values():
            self._seen(follower)
        return work

    def _go_on(
        self, going: Mapping[OpenSequence, DraftedSequence], drafted: Mapping[OpenSequence, list[int]]
    ) -> StepWork:
        """Do the pass of the tokens that were drafted last; the head's own rows stand for the model's."""
        hidden = torch.cat([_held(follower.hidden) for follower in going.values()])
        plan = SchedulerOutput(decodes=[follower.own for follower in going.values()])
        for one, follower in going.items():
            follower.own.tokens.append(drafted[one][-1])
            follower.own.table.blocks[0] = one.table.blocks[GROUP][follower.base // self._size :]
        work = StepWork.of(plan)
        self._compute(plan, {follower.own: follower for follower in going.values()}, hidden)
        return work

    def _compute(
        self, plan: SchedulerOutput, followers: Mapping[OpenSequence, DraftedSequence], hidden: Tensor
    ) -> None:
        """Do a pass, and keep of each sequence that was computed to its end what comes of it."""
        ended, rows, logits = self._passes.compute(plan, hidden)
        for own in plan.decodes:
            own.computed += 1
        for own, count in plan.chunks:
            own.computed += count
        for at, own in enumerate(ended):
            # Views would hold the whole pass's for as long as one sequence rests
            followers[own].hidden, followers[own].logits = rows[at : at + 1].clone(), logits[at : at + 1].clone()

    def _draw(
        self, going: Mapping[OpenSequence, DraftedSequence], drafted: dict[OpenSequence, list[int]]
    ) -> dict[OpenSequence, DraftedSequence]:
        """Add a token to each draft; return those that have one more."""
        if not going:
            return {}
        for one, follower in going.items():
            follower.row.go_to(one.num_output + len(drafted[one]))
        logits = torch.cat([_held(follower.logits) for follower in going.values()])
        tokens = self._sampler.sample_rows(logits, [follower.row for follower in going.values()]).tokens
        drawn = {one: token for one, token in zip(going, tokens, strict=True) if token != NO_TOKEN}
        for one, token in drawn.items():
            drafted[one].append(token)
        return {one: going[one] for one in drawn}


def _is_going_on(sequence: OpenSequence, first: int) -> bool:
    """Return whether it has places from `first` on that the head is to see."""
    return sequence.state is SequenceStatus.RUNNING and sequence.pictures is None and sequence.computed > first


def places_of(plan: SchedulerOutput, ahead: int = 0) -> list[StepPlace]:
    """Return of each sequence of a step that begins its first place there, and its rows.

    `ahead`: tokens of each that decodes that have been started and not been read.
    """
    firsts = {one: plan.begin_of(one) for one, _ in plan.chunks}
    return [(one, firsts.get(one, len(one.tokens) - 1 + ahead), rows) for one, rows in _rows_of(plan).items()]


def _rows_of(plan: SchedulerOutput) -> dict[OpenSequence, list[int]]:
    """Return the rows of each sequence in a step, by place."""
    rows = {one: [at] for at, one in enumerate(plan.decodes)}
    begin = len(plan.decodes)
    for one, ids in plan.drafts.items():
        rows[one] += range(begin, begin + len(ids))
        begin += len(ids)
    for one, count in plan.chunks:
        rows[one] = list(range(begin, begin + count))
        begin += count
    return rows


def _follower_of(sequence: OpenSequence) -> DraftedSequence:
    follower = drafting_of(sequence).follower
    assert follower is not None
    return follower


def _held(rows: Tensor | None) -> Tensor:
    assert rows is not None
    return rows
