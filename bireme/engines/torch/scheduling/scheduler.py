"""Decides what the next step works on: which requests decode, prefill, are admitted.

A step has a token budget. Decodes come first, then running prefills, then waiting requests by rank; the first that does
not fit stops the queue, so that none starves. GUARANTEED_NO_EVICT admits a request only with its worst case reserved.
MAX_UTILIZATION reserves the tokens it has and, when decode runs out of blocks, preempts from the lowest rank: the
request goes back to the queue and is computed again.

With scheduler_config.max_stream_gap_ms a step that has decodes takes no more of prompts than lets it end in that time
(stream_gap.py); a prompt has at least a small chunk of each step.

Best-effort requests (best_effort.py) come after all others, in what is left of a step or not at all; then they keep
their blocks and go on later. They are preempted for a request that finds no place.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bireme.best_effort import BestEffortShare
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.scheduling.step_costs import StepCosts
from bireme.engines.torch.scheduling.stream_gap import StreamGap
from bireme.engines.torch.scheduling.waiting import WaitingQueue
from bireme.engines.torch.step import SchedulerOutput, Sequence, SequenceStatus
from bireme.kv.blocks.block_manager import BlockManager


class Scheduler:
    def __init__(
        self,
        manager: BlockManager,
        limits: EngineLimits,
        clock: Callable[[], float] = time.monotonic,
        costs: StepCosts | None = None,
        can_start: Callable[[SchedulerOutput], bool] = lambda plan: False,
    ) -> None:
        """`costs`: what steps take, for limits.max_stream_gap_s. `can_start`: while the step before is under way."""
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # RUNNING and IMPORTING, in order of admission
        self.num_preemptions = 0
        self.num_prefill_tokens = 0  # of running prompts, left after the step that was planned last
        self.wakes_at: float | None = None  # when there is something to plan again, if nothing happens before
        self.best_effort = BestEffortShare(limits.best_effort_share)
        self._manager = manager
        self._limits = limits
        self._clock = clock
        self._can_start = can_start
        self._gap = StreamGap(costs, limits.max_stream_gap_s) if costs is not None and limits.max_stream_gap_s else None
        self._slots = list(range(limits.max_batch_size - 1, -1, -1))
        self._refused = (-1, -1)  # head of the queue and `num_released` when it did not fit

    def schedule(self) -> SchedulerOutput:
        now, plan = self._clock(), SchedulerOutput(budget=self._limits.max_num_tokens)
        active = _running(self.running)
        before = self.num_preemptions
        self.num_prefill_tokens, self.wakes_at = 0, None
        if self._limits.may_preempt:
            active.sort(key=lambda sequence: sequence.rank)
        self.best_effort.plan(now, self._has_others)
        self._plan([sequence for sequence in active if not sequence.is_best_effort], plan)
        if self.num_preemptions == before:
            self._admit(plan, lambda head: not head.is_best_effort, takes_places=True)
        self._plan_best_effort([sequence for sequence in active if sequence.is_best_effort], plan, now, before)
        if self.num_preemptions != before:
            plan.keep_running()
        return plan

    def follow(self, plan: SchedulerOutput) -> SchedulerOutput | None:
        """Plan the step after one that was started, before its tokens are known; None: they are needed first.

        Requests that reach their length in the first are left out, and those that wait join. One that turns out to have
        ended with a stop token takes part in vain: the blocks that it writes to are its own until then.
        """
        now = self._clock()
        self.best_effort.plan(now, self._has_others, plan.has_best_effort)
        rests = not self.best_effort.may_run(now)
        joins = self._may_join(rests)
        if joins and not self._can_join_ahead(plan):
            return None
        wanted, going = _running(self.running, rests), _running(plan.sampled, rests)
        prompts = self._prompts_ahead(plan, wanted, going) if len(going) < len(wanted) else []
        if prompts is None:
            return None
        going = [sequence for sequence in going if sequence.num_output + 1 < sequence.max_tokens]
        if not going or not all(self._has_room_ahead(sequence) for sequence in going):
            return None
        budget = self._limits.max_num_tokens - len(going)
        following = SchedulerOutput(decodes=going, under_way=plan.chunks, budget=budget)
        if prompts and not self._go_on(prompts, plan, following):
            return None
        self.best_effort.num_rests += len(wanted) < len(_running(self.running))
        if following.has_best_effort:
            self.best_effort.ran(now)
        if joins or prompts or not rests:  # a prompt may have been aborted
            left = (len(one.tokens) - following.begin_of(one) - dict(following.chunks).get(one, 0) for one in prompts)
            self.num_prefill_tokens = sum(left)
        if joins:
            self._admit(following, lambda head: not head.is_best_effort)
        return following

    def _prompts_ahead(
        self, plan: SchedulerOutput, wanted: list[Sequence], going: list[Sequence]
    ) -> list[Sequence] | None:
        """Return the prompts that go on after the step that was started; None: its tokens are needed first."""
        decodes, under_way = set(going), dict(plan.chunks)
        prompts = [one for one in wanted if one not in decodes]
        if plan.has_best_effort or any(one.is_best_effort for one in prompts):
            return None  # the one rests for the other
        return prompts if all(one in under_way or one.num_pending > 1 for one in prompts) else None

    def _go_on(self, prompts: list[Sequence], plan: SchedulerOutput, following: SchedulerOutput) -> bool:
        """Add the next parts of prompts, behind those that are under way; False: not before these have ended."""
        following.ahead.update((one, count) for one, count in plan.chunks if one in prompts)
        for sequence in prompts:
            count = self._chunk(sequence, following)
            end = following.begin_of(sequence) + count
            if not self._manager.can_grow(sequence.table, end, sequence.computed):
                return False
            if count:
                self._manager.grow(sequence.table, end, sequence.computed)
                following.chunks.append((sequence, count))
                following.budget -= count
        return self._can_start(following)

    def _may_join(self, rests: bool) -> bool:
        """Return whether the head of the queue may take part in the next step."""
        head = self.waiting.peek()
        if head is None or (rests and head.is_best_effort):
            return False
        return self._may_fit(head) and not self._can_join_later(head)

    def _can_join_ahead(self, plan: SchedulerOutput) -> bool:
        """Return whether the head of the queue needs nobody's place, and none rests for what it computes."""
        head = self.waiting.peek()
        assert head is not None
        return self._may_claim(head) and not head.is_best_effort and not plan.has_best_effort

    def _has_room_ahead(self, sequence: Sequence) -> bool:
        """Grow for the token after the one that is being computed; False: there are no blocks."""
        manager, computed = self._manager, len(sequence.tokens)
        has_room = manager.can_grow(sequence.table, computed + 1, computed)
        if has_room:
            manager.grow(sequence.table, computed + 1, computed)
        return has_room

    def admit_imports(self) -> SchedulerOutput:
        """Admit from the queue while its head's KV comes from prefill, beside a step that has been started."""
        plan = SchedulerOutput(budget=1)
        self._admit(plan, lambda head: _is_import(head) and not head.is_best_effort)
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, wherever it is; it keeps its blocks."""
        self.waiting.remove(sequence)
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._slots.append(sequence.slot)
            sequence.slot = -1
        sequence.state = SequenceStatus.FINISHED

    def found(self, sequence: Sequence) -> None:
        """Keep account of what it need not compute. Later admissions, after a preemption, find its own blocks."""
        if sequence.num_cached < 0:
            sequence.num_cached = min(sequence.computed, sequence.num_prompt)
            size = self._manager.tokens_per_block
            sequence.num_matched = {tier: count * size for tier, count in sequence.table.matched.items()}

    def prefilled(self, sequence: Sequence) -> None:
        """Free the reservation for prefill chunks: from now on it takes one token a step, and those of a draft."""
        if not self._limits.may_preempt:
            most = 1 + self._limits.max_draft_len
            self._manager.reserve(sequence.table, self._manager.worst_case(sequence.worst_length, most))

    @property
    def _has_others(self) -> bool:
        head = self.waiting.peek()  # if any of the others waits, it is one
        return (head is not None and not head.is_best_effort) or not all(one.is_best_effort for one in self.running)

    def _plan_best_effort(self, rows: list[Sequence], plan: SchedulerOutput, now: float, before: int) -> None:
        """Add best-effort requests, `rows` those in the batch, to a step that has all others; `before`: preemptions."""
        head = self.waiting.peek()
        if not rows and (head is None or not head.is_best_effort):
            return
        if not self.best_effort.may_run(now, plan.has_prompt):
            self.num_prefill_tokens += sum(sequence.num_pending for sequence in rows if sequence.num_pending > 1)
            self.best_effort.num_rests += plan.has_tokens
            self.wakes_at = self.best_effort.wakes_at
            return
        num_others = len(plan.decodes) + len(plan.chunks)
        most = plan.budget
        if self._limits.enable_chunked_prefill:
            most = self.best_effort.most_prompt_tokens(now, self._limits.max_num_tokens)
        self._plan(rows, plan, most)
        if self.num_preemptions == before:
            self._admit(plan, lambda head: head.is_best_effort)
        if len(plan.decodes) + len(plan.chunks) > num_others:
            self.best_effort.ran(now)

    def _plan(self, rows: list[Sequence], plan: SchedulerOutput, most_prompt_tokens: int | None = None) -> None:
        """Add running requests; `most_prompt_tokens`: that may be computed of their prompts, and of new ones."""
        prompts = []
        for sequence in rows:
            if sequence.num_pending == 1:
                self._plan_decode(sequence, plan)
            else:
                prompts.append(sequence)
        if most_prompt_tokens is not None:
            plan.budget = min(plan.budget, most_prompt_tokens)
        for sequence in prompts:
            if sequence.state is SequenceStatus.RUNNING:  # not preempted meanwhile
                self._plan_chunk(sequence, plan)

    def _plan_decode(self, sequence: Sequence, plan: SchedulerOutput) -> None:
        if (
            sequence.state is SequenceStatus.RUNNING
            and plan.budget
            and self._make_room(sequence, sequence.computed + 1)
        ):
            plan.decodes.append(sequence)
            plan.budget -= 1

    def _plan_chunk(self, sequence: Sequence, plan: SchedulerOutput) -> None:
        count = self._chunk(sequence, plan)
        self.num_prefill_tokens += sequence.num_pending - count
        if count and self._make_room(sequence, sequence.computed + count):
            plan.chunks.append((sequence, count))
            plan.budget -= count

    def _chunk(self, sequence: Sequence, plan: SchedulerOutput) -> int:
        """Return how many tokens of a prefill fit into the rest of the step; 0: none."""
        begin, budget = plan.begin_of(sequence), plan.budget
        pending = len(sequence.tokens) - begin
        # Without chunking a prompt waits for a step that takes it whole; a preempted one may be longer.
        if not self._limits.enable_chunked_prefill and budget < pending <= self._limits.max_num_tokens:
            return 0
        if sequence.wants_prompt_logprobs:  # all its logits are kept: chunks bound their memory
            budget = min(budget, self._limits.max_logprob_rows)
        count = min(budget, pending)
        return count if self._gap is None else self._gap.most_tokens(plan, begin, count)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow, preempting lower ranks if need be. False: it was preempted itself, or must wait."""
        manager, table = self._manager, sequence.table
        if len(table.blocks[0]) * manager.tokens_per_block >= num_tokens:
            return True
        while not manager.can_grow(table, num_tokens, sequence.computed):
            assert self._limits.may_preempt, "a reservation that does not hold"
            victim = max(_running(self.running), key=lambda other: other.rank)
            self._preempt(victim)
            if victim is sequence:
                return False
        manager.grow(table, num_tokens, sequence.computed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.requeue(sequence)
        self.num_preemptions += 1
        if sequence.spans is not None:
            sequence.preempted_at = self._clock()

    def requeue(self, sequence: Sequence) -> None:
        """Put an admitted sequence back into the queue; it holds nothing."""
        self._manager.release(sequence.table)
        self.finish(sequence)
        sequence.state, sequence.computed = SequenceStatus.WAITING, 0
        sequence.prompt_logprobs = []
        if sequence.drafting is not None:
            sequence.drafting.follower, sequence.drafting.num_seen = None, 0
        self.waiting.push(sequence)

    def _may_fit(self, head: Sequence) -> bool:
        """Return whether it is worth trying to admit the head of the queue."""
        if self._may_claim(head):
            return True
        return not head.is_best_effort and self._last_best_effort() is not None

    def _can_join_later(self, head: Sequence) -> bool:
        """Return whether it takes no part in the next step even if it is admitted, and needs nobody's place."""
        return self._may_claim(head) and _is_import(head) and not head.is_best_effort

    def _last_best_effort(self) -> Sequence | None:
        """Return the best-effort request to preempt next.

        None with pictures, where no others are preempted: embeddings are let go of once the prompt is computed.
        """
        may = [
            sequence
            for sequence in _running(self.running)
            if sequence.is_best_effort and (sequence.pictures is None or self._limits.may_preempt)
        ]
        return max(may, key=lambda sequence: sequence.rank, default=None)

    def _admit(self, plan: SchedulerOutput, is_wanted: Callable[[Sequence], bool], takes_places: bool = False) -> None:
        """Admit from the queue while its head is of this kind. `takes_places`: those of best-effort requests, too."""
        while plan.budget and (head := self.waiting.peek()) is not None and is_wanted(head):
            if not self._claim(head):
                victim = self._last_best_effort() if takes_places else None
                if victim is None:
                    return
                self._preempt(victim)
            elif self._manager.is_coming(head.table):
                self._manager.release(head.table)
                self.waiting.park(head)
            elif not self._take_in(head, plan):
                self._manager.release(head.table)
                return

    def _take_in(self, head: Sequence, plan: SchedulerOutput) -> bool:
        """Move the head of the queue, whose blocks are claimed, into the batch; False: not in this step."""
        manager, is_import = self._manager, _is_import(head)
        if is_import:
            manager.slide(head.table, len(head.tokens))
            manager.grow(head.table, len(head.tokens), len(head.tokens))
        elif self._is_computing(plan, head):
            return False
        if copies := manager.onboard(head.table):
            head.state = SequenceStatus.IMPORTING
            plan.onboards.append((head, copies))
        elif is_import:
            head.state = SequenceStatus.IMPORTING
            plan.imports.append(head)
        elif count := self._chunk(head, plan):
            head.state = SequenceStatus.RUNNING
            manager.grow(head.table, head.computed + count, head.computed)
            self._place(head, count, plan)
        else:
            return False
        if not copies:
            self.found(head)
        if head.spans is not None and head.preempted_at:
            head.spans.add("preempted", head.preempted_at, self._clock())
            head.preempted_at = 0.0
        self.waiting.remove(head)
        head.slot = self._slots.pop()
        head.mirrored, head.resident = [0] * len(manager.groups), []
        self.running.append(head)
        return True

    def _is_computing(self, plan: SchedulerOutput, sequence: Sequence) -> bool:
        """Return whether the next block that the sequence lacks is being computed: it shares that in a later step."""
        size, hashes = self._manager.tokens_per_block, sequence.table.hashes
        missing = sequence.computed // size
        if sequence.wants_prompt_logprobs or missing >= len(hashes):
            return False
        return any(
            hashes[missing] in other.table.hashes[begin // size : (begin + count) // size]
            for begin, other, count in [
                *((plan.begin_of(other), other, count) for other, count in plan.chunks),
                *((other.computed, other, count) for other, count in plan.under_way or ()),
            ]
        )

    def _place(self, sequence: Sequence, count: int, plan: SchedulerOutput) -> None:
        if sequence.num_pending == 1 and plan.under_way is None:
            plan.decodes.append(sequence)
        else:  # ahead, decodes go on from a token that nobody knows
            plan.chunks.append((sequence, count))
            self.num_prefill_tokens += sequence.num_pending - count
        plan.budget -= count

    def _claim(self, sequence: Sequence) -> bool:
        """Take the cached prefix and reserve the rest; on failure nothing is held."""
        if not self._may_claim(sequence):
            return False
        manager, table, matched = self._manager, sequence.table, 0
        if not sequence.wants_prompt_logprobs:
            most = len(sequence.tokens) - (not _is_import(sequence))
            matched = manager.match(table, sequence.tokens, most)
        if not manager.reserve(table, self.need(sequence)):
            manager.release(table)
            self._refused = (sequence.number, manager.num_released)
            return False
        sequence.computed = matched
        return True

    def _may_claim(self, head: Sequence) -> bool:
        """Return whether there is a slot, and perhaps room: the head of the queue did not fit into what there was."""
        return bool(self._slots) and (head.number, self._manager.num_released) != self._refused

    def need(self, sequence: Sequence) -> list[int]:
        """Return the blocks per group to reserve at admission."""
        length = len(sequence.tokens) if self._limits.may_preempt else sequence.worst_length
        return self._manager.worst_case(length, self._limits.max_num_tokens)


def _is_import(sequence: Sequence) -> bool:
    """Return whether its KV comes from prefill; it does so once."""
    return sequence.params is not None and not sequence.is_sampling


def _running(sequences: list[Sequence], rests: bool = False) -> list[Sequence]:
    """Return those that may take part in a step. `rests`: best-effort ones may not."""
    return [
        sequence
        for sequence in sequences
        if sequence.state is SequenceStatus.RUNNING and not (rests and sequence.is_best_effort)
    ]
