"""What a step record has of the statistics of TensorRT-LLM's iterations, by release."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

from bireme.engines.trtllm.iterations import Iterations
from bireme.engines.trtllm.step_records import record_of
from bireme.kv.wire.step_records import StepRing
from bireme.metrics import Registry

OLD = {
    "numScheduledRequests": 3,
    "numContextRequests": 1,
    "numGenRequests": 2,
    "numPausedRequests": 1,
    "numCtxTokens": 40,
}
NEW = OLD | {
    "numCtxKvTokens": 64,
    "numGenKvTokens": 300,
    "numQueuedContextRequests": 4,
    "numQueuedCtxTokens": 500,
    "numQueuedGenRequests": 2,
    "numQueuedGenKvTokens": 70,
    "numPausedKvTokens": 30,
}


def stats(batch, **others):
    return {"iter": 7, "iterLatencyMS": 12.5, "inflightBatchingStats": batch} | others


def told(batch):
    record = msgspec.to_builtins(record_of(stats(batch)))
    return record["scheduled_requests"], record["queued_requests"]


def test_a_release_that_tells_all_fills_every_field_but_variances():
    scheduled, queued = told(NEW)
    assert scheduled == {
        "num_prefill_requests": 1,
        "sum_prefill_tokens": 40,
        "sum_prefill_kv_tokens": 64,
        "num_decode_requests": 2,
        "sum_decode_kv_tokens": 300,
    }
    assert queued == {
        "num_prefill_requests": 4,
        "sum_prefill_tokens": 500,
        "num_decode_requests": 3,
        "sum_decode_kv_tokens": 100,
    }


def test_what_a_release_does_not_tell_is_absent_and_not_0():
    scheduled, queued = told(OLD)
    assert scheduled == {"num_prefill_requests": 1, "sum_prefill_tokens": 40, "num_decode_requests": 2}
    assert queued == {}
    assert told({"numGenRequests": 1}) == ({"num_decode_requests": 1}, {})


def test_an_iteration_without_requests_or_time_has_no_record():
    assert record_of(stats({"numContextRequests": 0, "numGenRequests": 0})) is None
    assert record_of(stats({"numScheduledRequests": 3})) is None
    assert record_of({"iter": 7, "inflightBatchingStats": NEW}) is None
    assert record_of({"iter": 7, "iterLatencyMS": 1.0}) is None


def test_iterations_are_recorded_by_rank_where_that_is_asked_for():
    ring, relay = StepRing(), SimpleNamespace(iteration=lambda told: None)
    for steps in (ring, None):
        iterations = Iterations(object(), Registry("decode"), relay, 32, 0, has_stats=True, steps=steps)
        for rank in (0, 1, 0):
            iterations._take_stats(stats(NEW, attentionDpRank=rank))
    records = ring.drain()
    assert [(one.dp_rank, one.counter_id, one.wall_time) for one in records] == [
        (0, 0, 0.0125),
        (1, 0, 0.0125),
        (0, 1, 0.0125),
    ]
