"""Drafts of an EAGLE-3 head: what the model made of each token says which ones it would say next.

The head's pass over a step follows that step. It writes keys and values of each place that was verified, under the
model's block ids, and has at the end of a sequence what its first drafted token is drawn from. Further ones take a pass
each, in which the head's own rows stand in for the model's; the next step's pass writes these places anew.

Of tokens that the model has not computed here (a cached prefix, KV that came by transfer or from a lower tier) the head
knows what full blocks have of an earlier request, by their hashes. Where they have nothing, it sees the sequence from
the first block on of which it knows all: drafts are worse, and no token is another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from bireme.engines.base import RequestKey
from bireme.engines.torch.forward.eagle_passes import EaglePasses
from bireme.engines.torch.scheduling.speculation.drafter import drafting_of
from bireme.engines.torch.scheduling.speculation.followers import KnownBlocks, follow
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import Batch, Draft, DraftedSequence, SchedulerOutput, SequenceStatus
from bireme.engines.torch.step import Sequence as OpenSequence
from bireme.logits.sampler import NO_TOKEN, Sampler


class EagleDrafter:
    """Used by the engine's thread, between the model's steps."""

    num_kinds = 1

    def __init__(
        self,
        passes: EaglePasses,
        sampler: Sampler[RequestKey],
        num_blocks: int,
        tokens_per_block: int,
        max_seq_len: int,
    ) -> None:
        self.costs: StepCosts | None = StepCosts()
        self._passes, self._sampler, self._size, self._max_seq_len = passes, sampler, tokens_per_block, max_seq_len
        self._blocks = KnownBlocks(num_blocks, tokens_per_block)

    def room(self, sequence: OpenSequence) -> int:
        """None where the head has not seen the last token's place."""
        follower = sequence.drafting.follower if sequence.drafting is not None else None
        is_ready = follower is not None and follower.logits is not None
        return self._max_seq_len - len(sequence.tokens) if is_ready else 0

    def observe(self, plan: SchedulerOutput, batch: Batch) -> None:
        """Take in a step of the model whose tokens have been delivered."""
        positions = batch.positions.flatten(0, -2)[0].tolist()
        followers: dict[OpenSequence, DraftedSequence] = {}
        taken: dict[OpenSequence, list[int]] = {}
        for sequence, rows in _rows_of(plan).items():
            first = positions[rows[0]]
            if _is_going_on(sequence, first):
                follower = self._advance(sequence, first)
                if used := rows[max(0, follower.base - first) : sequence.computed - first]:
                    followers[follower.own], taken[follower.own] = follower, used
        if not followers:
            return
        following = _plan_of(taken)
        seen = [row for own in following.sequences for row in taken[own]]
        self._compute(following, followers, self._passes.fused(seen))
        for follower in followers.values():
            self._remember(follower)

    def _remember(self, follower: DraftedSequence) -> None:
        own = follower.own
        follower.num_verified = follower.base + own.computed
        if not follower.base:
            self._blocks.remember(own.table.blocks[0], own.table.hashes, own.computed, 0)

    def _advance(self, sequence: OpenSequence, first: int) -> DraftedSequence:
        """Return the sequence as the head has it, before the place `first`."""
        drafting = drafting_of(sequence)
        if drafting.follower is None or drafting.follower.num_verified < first:
            drafting.follower = self._open(sequence, first)
        follower, own = drafting.follower, drafting.follower.own
        own.computed = max(0, first - follower.base)
        own.tokens[own.computed :] = sequence.tokens[follower.base + own.computed + 1 :]  # who follows each place
        own.table.blocks[0] = sequence.table.blocks[0][follower.base // self._size :]
        own.table.hashes = sequence.table.hashes
        follower.hidden = follower.logits = None
        self._blocks.forget(own.table.blocks[0], own.computed, len(own.tokens))
        return follower

    def _open(self, sequence: OpenSequence, first: int) -> DraftedSequence:
        number = -(-first // self._size)
        if first == number * self._size:
            number = self._blocks.first_known(sequence.table.blocks[0], sequence.table.hashes, number)
        follower = follow(sequence, 1, self._sampler.vocab_size)
        follower.base = number * self._size
        follower.own.tokens = sequence.tokens[follower.base + 1 :]
        return follower

    def propose(self, most: Mapping[OpenSequence, int], budget: int) -> dict[OpenSequence, Draft]:
        ready = {one: follower for one in most if (follower := drafting_of(one).follower) is not None}
        drafted: dict[OpenSequence, list[int]] = {one: [] for one in ready}
        for one, follower in ready.items():
            held = follower.own.computed
            follower.own.table.blocks[0] = one.table.blocks[0][follower.base // self._size :]
            self._blocks.forget(follower.own.table.blocks[0], held, held + most[one])
        going = self._draw(ready, drafted)
        while going := {one: follower for one, follower in going.items() if len(drafted[one]) < most[one]}:
            began, work = time.monotonic(), self._go_on(going, drafted)
            going = self._draw(going, drafted)
            if self.costs is not None:
                self.costs.landed([work], time.monotonic() - began)
        return {one: Draft(tokens) for one, tokens in drafted.items() if tokens}

    def _go_on(
        self, going: Mapping[OpenSequence, DraftedSequence], drafted: Mapping[OpenSequence, list[int]]
    ) -> StepWork:
        """Do the pass of the tokens that were drafted last; the head's own rows stand for the model's."""
        hidden = torch.cat([_held(follower.hidden) for follower in going.values()])
        plan = SchedulerOutput(decodes=[follower.own for follower in going.values()])
        for one, follower in going.items():
            follower.own.tokens.append(drafted[one][-1])
            follower.own.table.blocks[0] = one.table.blocks[0][follower.base // self._size :]
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


def _plan_of(taken: Mapping[OpenSequence, list[int]]) -> SchedulerOutput:
    plan = SchedulerOutput()
    for own, rows in taken.items():
        if own.num_pending == 1:
            plan.decodes.append(own)
        else:
            plan.chunks.append((own, len(rows)))
    return plan


def _held(rows: Tensor | None) -> Tensor:
    assert rows is not None
    return rows
