"""What each engine step computed and how long it took, in the form of Dynamo's forward-pass metrics.

    [`forward-pass-metrics`, counter_id, payload]   on a socket of its own; counter_id: signed 64 bits, big endian, from
                                                    0 without gaps a life and rank; payload: a msgpack map, StepRecord

What an engine does not know is absent. `ts`, `life` and `path` are bireme's own fields, which Dynamo's readers leave
out. A record whose wall_time is 0 is a sign of life of an idle engine.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

STEP_TOPIC = b"forward-pass-metrics"
StepKind = Literal["prefill", "decode", "mixed"]
_RING_SIZE = 4096  # steps of 5 ms in 20 s


class ScheduledRequests(msgspec.Struct, gc=False):
    """What a step computed. A prompt's last token counts as prefill, whatever computes it."""

    num_prefill_requests: int | UnsetType = UNSET
    sum_prefill_tokens: int | UnsetType = UNSET  # computed in this step
    var_prefill_length: float | UnsetType = UNSET  # of the whole prompts, not of their chunks
    sum_prefill_kv_tokens: int | UnsetType = UNSET  # read: from the prefix cache, and of chunks before
    num_decode_requests: int | UnsetType = UNSET
    sum_decode_kv_tokens: int | UnsetType = UNSET  # read
    var_decode_kv_tokens: float | UnsetType = UNSET

    @property
    def kind(self) -> StepKind | None:
        """None: it is not known, or nothing was computed."""
        if self.num_prefill_requests is UNSET or self.num_decode_requests is UNSET:
            return None
        if self.num_prefill_requests:
            return "mixed" if self.num_decode_requests else "prefill"
        return "decode" if self.num_decode_requests else None

    @property
    def num_tokens(self) -> int | None:
        """Tokens that were computed, one of each decode request; None: not known."""
        if self.sum_prefill_tokens is UNSET or self.num_decode_requests is UNSET:
            return None
        return self.sum_prefill_tokens + self.num_decode_requests


class QueuedRequests(msgspec.Struct, gc=False):
    """What waited at a step's end. Decode: it was preempted, or its KV is to come from prefill."""

    num_prefill_requests: int | UnsetType = UNSET
    sum_prefill_tokens: int | UnsetType = UNSET  # whole prompts: what the prefix cache has is not known before
    var_prefill_length: float | UnsetType = UNSET
    num_decode_requests: int | UnsetType = UNSET
    sum_decode_kv_tokens: int | UnsetType = UNSET
    var_decode_kv_tokens: float | UnsetType = UNSET


NOTHING_SCHEDULED = ScheduledRequests(0, 0, 0.0, 0, 0, 0, 0.0)
NOTHING_QUEUED = QueuedRequests(0, 0, 0.0, 0, 0, 0.0)


class StepRecord(msgspec.Struct, gc=False, kw_only=True):
    version: int = 1
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float  # seconds, since the step before where they follow each other at once
    scheduled_requests: ScheduledRequests
    queued_requests: QueuedRequests
    ts: float  # Unix time of the step's end
    life: int = 0  # of the engine process: counter_id begins anew with each
    path: str | UnsetType = UNSET  # what computed it, of the torch engine: the label of bireme_engine_steps_total


class StepRing:
    """Records between an engine's thread, which never waits, and their reader. Without room the oldest are dropped."""

    def __init__(self, max_size: int = _RING_SIZE) -> None:
        self._records: deque[StepRecord] = deque(maxlen=max_size)
        self._next: Counter[int] = Counter()  # by rank

    def add(self, record: StepRecord) -> None:
        """Number it; a gap in the numbers of a rank is what was dropped."""
        record.counter_id = self._next[record.dp_rank]
        self._next[record.dp_rank] += 1
        self._records.append(record)

    def drain(self) -> list[StepRecord]:
        """Return what is there, oldest first, from any one thread."""
        records: list[StepRecord] = []
        for _ in itertools.repeat(None, len(self._records)):
            try:
                records.append(self._records.popleft())
            except IndexError:  # the ring ran over: what was counted is less by now
                break
        return records
