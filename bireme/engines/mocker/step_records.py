"""Makes the record of each of the mocker's steps."""

from __future__ import annotations

import time

from bireme.engines.child.step_sums import DecodeSums, QueueSums, Sums
from bireme.engines.mocker.sequence import MockSequence
from bireme.kv.wire.step_records import ScheduledRequests, StepRecord, StepRing


class MockRecorder:
    """Used from the engine's thread alone."""

    def __init__(self, ring: StepRing) -> None:
        self._ring = ring
        self._queue = QueueSums()
        self._decodes: DecodeSums[MockSequence] = DecodeSums()
        self._prompts: list[tuple[MockSequence, int]] = []  # of the step under way, and what was left of each before

    def queued(self, one: MockSequence) -> None:
        self._queue.add(one.num_prompt, one.params is not None)

    def left_queue(self, one: MockSequence) -> None:
        self._queue.remove(one.num_prompt, one.params is not None)

    def begin(self, decoding: list[MockSequence], prefilling: list[MockSequence]) -> None:
        self._decodes.count(decoding, _lengths)
        self._prompts = [(one, one.prefill_left) for one in prefilling]

    def stepped(self, seconds: float) -> None:
        decodes = self._decodes.sums
        computed = [(one, left) for one, left in self._prompts if left > one.prefill_left]
        lengths = Sums.of([one.num_prompt for one, _ in computed])
        scheduled = ScheduledRequests(
            lengths.num,
            sum(left - one.prefill_left for one, left in computed),
            lengths.variance,
            sum(one.num_prompt - left for one, left in computed),
            decodes.num,
            decodes.total,
            decodes.variance,
        )
        self._ring.add(
            StepRecord(
                wall_time=seconds,
                scheduled_requests=scheduled,
                queued_requests=self._queue.requests,
                ts=time.time(),
            )
        )


def _lengths(rows: list[MockSequence]) -> list[int]:
    """The last token of each is still to be computed."""
    return [one.num_prompt - one.request.num_resumed + one.num_generated - 1 for one in rows]
