"""Drafts of a second, smaller model, drawn as the target draws: by the same noise, temperature, top-k and top-p.

Its keys and values lie in pools of its own, under the block ids that the target's sequences hold. So there is nothing
to allocate, free or preempt for it: whoever holds a block holds both. What it has not seen of a sequence (a prompt,
blocks that came by transfer or from a lower tier, tokens of steps without drafts) it computes before it drafts, in
parts where there is much of it. A full block whose rows it has is known by its hash until a row of it is written
again, so a cached prefix is computed once.

Penalties, guides and processors are the target's alone: they see tokens one after the other. Where they change what
is drawn, drafts fail more often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bireme.engines.base import RequestKey
from bireme.engines.torch.forward.forward import Computed, Forward
from bireme.engines.torch.scheduling.speculation.drafter import PassCosts, drafting_of
from bireme.engines.torch.scheduling.speculation.followers import GROUP, KnownBlocks, follow
from bireme.engines.torch.scheduling.step_costs import StepWork
from bireme.engines.torch.step import Draft, DraftedSequence, SchedulerOutput
from bireme.engines.torch.step import Sequence as OpenSequence
from bireme.logits.rows import Row
from bireme.logits.sampler import NO_TOKEN, Sampler


class DraftModel:
    """Used by the engine's thread, between the target's steps."""

    num_kinds = 1

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler[RequestKey],
        num_groups: int,
        num_blocks: int,
        tokens_per_block: int,
        max_seq_len: int,
    ) -> None:
        """`sampler`: for rows of its own. `num_groups`: of the draft model. `max_seq_len`: that it was made for."""
        self.costs = PassCosts(forward.modules.device)
        self._forward, self._sampler = forward, sampler
        self._num_groups, self._size, self._max_seq_len = num_groups, tokens_per_block, max_seq_len
        self._blocks = KnownBlocks(num_blocks, tokens_per_block)

    def room(self, sequence: OpenSequence) -> int:
        """Pictures are the target's alone."""
        return self._max_seq_len - len(sequence.tokens) if sequence.pictures is None else 0

    def propose(self, most: Mapping[OpenSequence, int], budget: int) -> dict[OpenSequence, Draft]:
        self.costs.begin()
        followers = {one: self._follow(one) for one in most}
        owners = {follower.own: one for one, follower in followers.items()}
        going = self._catch_up(followers, owners, most, budget)
        while going := [own for own in going if followers[owners[own]].num_drafted < most[owners[own]]]:
            going = self._compute(SchedulerOutput(decodes=going), followers, owners)
        drafts = {one: Draft(follower.drafted) for one, follower in followers.items()}
        return {one: draft for one, draft in drafts.items() if draft.tokens}

    def _catch_up(
        self,
        followers: Mapping[OpenSequence, DraftedSequence],
        owners: Mapping[OpenSequence, OpenSequence],
        most: Mapping[OpenSequence, int],
        budget: int,
    ) -> list[OpenSequence]:
        """Compute what was not seen; return the sequences that have their first drafted token."""
        plan = _first_pass(list(owners), budget)
        for own in plan.sequences:
            self._blocks.forget(own.table.blocks[0], own.computed, len(own.tokens) + most[owners[own]])
        going = self._compute(plan, followers, owners)
        for own in plan.sequences:
            table = owners[own].table
            self._blocks.remember(table.blocks[GROUP], table.hashes, own.computed, table.first[GROUP])
        return going

    def _follow(self, sequence: OpenSequence) -> DraftedSequence:
        """Return the sequence as this model has it, up to the token that was verified last."""
        drafting, tokens = drafting_of(sequence), sequence.tokens
        if drafting.follower is None:
            drafting.follower = self._open(sequence)
        follower, own = drafting.follower, drafting.follower.own
        at, most = follower.num_verified, min(len(own.tokens), len(tokens))
        while at < most and own.tokens[at] == tokens[at]:
            at += 1
        own.tokens[at:] = tokens[at:]
        follower.num_verified = len(tokens)
        # Rows that slid out of the window are of somebody else's block by now.
        own.computed = max(min(own.computed, at, len(tokens) - 1), sequence.table.first[GROUP] * self._size)
        return follower

    def _open(self, sequence: OpenSequence) -> DraftedSequence:
        first, last = sequence.table.first[GROUP], (len(sequence.tokens) - 1) // self._size
        number = self._blocks.end_of_known(sequence.table.blocks[GROUP], sequence.table.hashes, first, last)
        follower = follow(sequence, self._num_groups, self._sampler.vocab_size)
        follower.own.computed = follower.num_verified = number * self._size
        follower.own.tokens = sequence.tokens[: follower.num_verified]
        return follower

    def _compute(
        self,
        plan: SchedulerOutput,
        followers: Mapping[OpenSequence, DraftedSequence],
        owners: Mapping[OpenSequence, OpenSequence],
    ) -> list[OpenSequence]:
        """Do a pass, and add to each sequence that was computed to its end the token that is drawn; return these."""
        if not plan.has_tokens:
            return []
        began, work = self.costs.now(), StepWork.of(plan)
        computed = self._forward.run(plan)
        for own in plan.decodes:
            own.computed += 1
        for own, count in plan.chunks:
            own.computed += count
        if not computed.batch.sampled:  # on a GPU nobody has waited for it
            self.costs.passed(work, began, is_seen=False)
            return []
        tokens = self._draw(computed, [followers[owners[own]].row for own in computed.batch.sampled])
        self.costs.passed(work, began)
        drawn = {own: token for own, token in zip(computed.batch.sampled, tokens, strict=True) if token != NO_TOKEN}
        for own, token in drawn.items():
            own.tokens.append(token)
        return list(drawn)

    def _draw(self, computed: Computed, rows: list[Row]) -> list[int]:
        for own, row in zip(computed.batch.sampled, rows, strict=True):
            row.go_to(len(own.tokens) - own.num_prompt)
        return self._sampler.sample_rows(computed.logits[: len(rows)], rows).tokens


def _first_pass(sequences: Sequence[OpenSequence], budget: int) -> SchedulerOutput:
    """Return the pass that has each sequence's tokens up to its last, as far as the budget reaches."""
    plan = SchedulerOutput(budget=budget)
    for own in sorted(sequences, key=lambda own: own.num_pending):
        if own.num_pending == 1:
            plan.decodes.append(own)
        elif count := min(plan.budget, own.num_pending):
            plan.chunks.append((own, count))
            plan.budget -= count
    return plan
