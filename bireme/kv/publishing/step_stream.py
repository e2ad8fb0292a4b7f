"""An engine's step records on their way out: stamped, counted in the metrics, encoded. Not on the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from bireme.kv.wire.event_wire import encode_payload
from bireme.kv.wire.step_records import NOTHING_QUEUED, NOTHING_SCHEDULED, StepRecord, StepRing
from bireme.metrics import Registry

HEARTBEAT_S = 1.0


@dataclass(slots=True)
class _Numbers:
    next_step: int = 0  # as the ring numbers them
    num_heartbeats: int = 0  # which are numbered as well
    told_at: float = 0.0


class StepStream:
    """Used from the publisher's thread alone."""

    def __init__(self, ring: StepRing, worker_id: str, life: int, num_ranks: int, metrics: Registry) -> None:
        self._ring, self._metrics = ring, metrics
        self._worker_id, self._life = worker_id, life
        self._ranks = {number: _Numbers() for number in range(num_ranks)}
        metrics.start("bireme_step_records_lost_total")

    def take(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and payload of what is to be sent now."""
        now = time.monotonic()
        for record in self._ring.drain():
            rank = self._ranks.setdefault(record.dp_rank, _Numbers())
            if record.counter_id > rank.next_step:
                self._metrics.add("bireme_step_records_lost_total", record.counter_id - rank.next_step)
            rank.next_step = record.counter_id + 1
            rank.told_at = now
            self._observe(record)
            yield self._message(record, record.counter_id + rank.num_heartbeats)
        for number, rank in self._ranks.items():
            if now - rank.told_at >= HEARTBEAT_S:
                rank.told_at = now
                rank.num_heartbeats += 1
                yield self._message(_heartbeat(number), rank.next_step + rank.num_heartbeats - 1)

    def _message(self, record: StepRecord, number: int) -> tuple[int, bytes]:
        record.counter_id, record.worker_id, record.life = number, self._worker_id, self._life
        return number, encode_payload(record)

    def _observe(self, record: StepRecord) -> None:
        scheduled = record.scheduled_requests
        if (kind := scheduled.kind) is None:
            return
        self._metrics.observe("bireme_forward_pass_seconds", record.wall_time, kind)
        if (num_tokens := scheduled.num_tokens) is not None:
            self._metrics.observe("bireme_forward_pass_tokens", num_tokens, kind)


def _heartbeat(rank: int) -> StepRecord:
    return StepRecord(
        dp_rank=rank,
        wall_time=0.0,
        scheduled_requests=NOTHING_SCHEDULED,
        queued_requests=NOTHING_QUEUED,
        ts=time.time(),
    )
