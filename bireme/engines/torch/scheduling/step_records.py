"""Makes the record of each step: what it computes is counted when it begins, what waits when it has ended."""

from __future__ import annotations

import time

from bireme.engines.child.step_sums import DecodeSums, QueueSums, Sums
from bireme.engines.torch.scheduling.waiting import WaitingQueue
from bireme.engines.torch.step import SchedulerOutput, Sequence
from bireme.kv.wire.step_records import ScheduledRequests, StepRecord, StepRing


class StepRecorder:
    """Used from the engine's thread alone."""

    def __init__(self, ring: StepRing, queue: WaitingQueue) -> None:
        self._ring = ring
        self._queue = queue.sums = QueueSums()
        self._decodes: DecodeSums[Sequence] = DecodeSums()
        self._ended_at = 0.0  # of the step before, if the next one follows at once

    def scheduled(self, plan: SchedulerOutput, ahead: int = 0) -> ScheduledRequests:
        """Count what a step computes, before its tokens are accepted. `ahead`: 1 if the step before has not ended."""
        is_same = self._decodes.count(plan.decodes, _lengths_ahead if ahead else _lengths)
        decodes = self._decodes.sums
        # A row that was in the step before has had its first token by now, or is about to have it.
        firsts = [] if is_same or ahead else [one for one in plan.decodes if not one.first_token_at]
        if not plan.chunks and not firsts:
            return ScheduledRequests(0, 0, 0.0, 0, decodes.num, decodes.total, decodes.variance)
        prompts = [*plan.chunks, *((one, 1) for one in firsts)]
        lengths = Sums.of([len(one.tokens) for one, _ in prompts])
        kept = Sums(decodes.num, decodes.total, decodes.squares)
        for one in firsts:
            kept.remove(one.computed)
        return ScheduledRequests(
            lengths.num,
            sum(count for _, count in prompts),
            lengths.variance,
            sum(plan.begin_of(one) for one, _ in prompts),
            kept.num,
            kept.total,
            kept.variance,
        )

    def jumped(self) -> None:
        """Sequences of the step got more than a token."""
        self._decodes.forget()

    def stepped(self, scheduled: ScheduledRequests, path: str, began_at: float) -> None:
        """It has ended. One that follows another at once is measured from that one's end."""
        now = time.monotonic()
        self._ring.add(
            StepRecord(
                wall_time=now - (self._ended_at or began_at),
                scheduled_requests=scheduled,
                queued_requests=self._queue.requests,
                ts=time.time(),
                path=path,
            )
        )
        self._ended_at = now

    def rest(self) -> None:
        """The next step follows none."""
        self._ended_at = 0.0


def _lengths(rows: list[Sequence]) -> list[int]:
    return [one.computed for one in rows]


def _lengths_ahead(rows: list[Sequence]) -> list[int]:
    return [len(one.tokens) for one in rows]
