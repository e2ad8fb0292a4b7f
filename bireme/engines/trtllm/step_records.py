"""A step record of an iteration's statistics. A release tells some of it: what it does not tell is absent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from bireme.kv.wire.step_records import QueuedRequests, ScheduledRequests, StepRecord


def record_of(stats: Mapping[str, Any]) -> StepRecord | None:
    """None: the iteration computed nothing, or its time or its requests are not told."""
    batch, latency_ms = stats.get("inflightBatchingStats"), stats.get("iterLatencyMS")
    if not batch or latency_ms is None or not (batch.get("numContextRequests") or batch.get("numGenRequests")):
        return None
    return StepRecord(
        dp_rank=int(stats.get("attentionDpRank") or 0),
        wall_time=latency_ms / 1e3,
        scheduled_requests=ScheduledRequests(
            num_prefill_requests=_sum(batch, "numContextRequests"),
            sum_prefill_tokens=_sum(batch, "numCtxTokens"),
            sum_prefill_kv_tokens=_sum(batch, "numCtxKvTokens"),
            num_decode_requests=_sum(batch, "numGenRequests"),
            sum_decode_kv_tokens=_sum(batch, "numGenKvTokens"),
        ),
        queued_requests=QueuedRequests(
            num_prefill_requests=_sum(batch, "numQueuedContextRequests"),
            sum_prefill_tokens=_sum(batch, "numQueuedCtxTokens"),
            num_decode_requests=_sum(batch, "numPausedRequests", "numQueuedGenRequests"),
            sum_decode_kv_tokens=_sum(batch, "numPausedKvTokens", "numQueuedGenKvTokens"),
        ),
        ts=time.time(),
    )


def _sum(batch: Mapping[str, Any], *names: str) -> Any:
    """Return the sum of these figures, or UNSET where one is missing."""
    return sum(int(batch[name]) for name in names) if all(name in batch for name in names) else UNSET
