"""The ring of timelines: its bounds, and what a timeline says of spans that are missing."""

import time

import numpy as np
import pytest

from bireme.messages import EngineSpan
from bireme.metrics import Registry
from bireme.observability.timeline import timeline_of
from bireme.observability.timelines import RESPONSE_ID, Timelines, _kept
from bireme.observability.traces import Traces
from bireme.request_trace import EngineSpans, PromptWork, RequestTrace, TokenTimes, TracedSequence


def traced(request_id="a", tenant="", num_deliveries=0, response_id=""):
    trace = RequestTrace("POST /v1/completions", None, True, time.monotonic())
    trace.request_id, trace.tenant = request_id, tenant
    if response_id:
        trace.root.attributes[RESPONSE_ID] = response_id
    sequence = TracedSequence(0, np.zeros(5, np.int32), token_times=TokenTimes())
    for at in range(num_deliveries):
        sequence.token_times.note(trace.root.start_us + 1000 * at, 1)
    trace.sequences.append(sequence)
    return trace


def ended(timelines, *args, **kwargs):
    trace = traced(*args, **kwargs)
    timelines.begin(trace)
    trace.finish()
    timelines.keep(trace)


def test_entries_and_bytes_are_bounded():
    timelines = Timelines(10, 1 << 20)
    for number in range(25):
        ended(timelines, f"{number}", response_id=f"answer-{number}")
    assert [timelines.find("", f"{number}") is not None for number in (14, 15, 24)] == [False, True, True]
    assert len(timelines._requests) == 10 and timelines._running == {}
    small = Timelines(1000, 50_000)
    for number in range(100):
        ended(small, f"{number}", num_deliveries=100)
    assert 0 < small.num_bytes <= 50_000 and small.find("", "99") is not None and small.find("", "0") is None


def test_one_that_would_fill_the_ring_is_kept_without_its_tokens_times():
    timelines = Timelines(10, 100_000)
    ended(timelines, num_deliveries=4000)
    assert timelines.find("", "a").tokens[0].deliveries == []


def test_of_two_with_one_id_the_newer_is_found_and_a_key_finds_its_own():
    timelines = Timelines(10, 1 << 20)
    ended(timelines, response_id="one")
    ended(timelines, response_id="two")
    assert timelines.find("", "a").response_id == "two" and timelines.find("", "one") is None
    ended(timelines, tenant="alice")
    assert timelines.find("alice", "a") is not None and timelines.find("bob", "a") is None
    assert len(timelines._kept) == 2


def spans_of(trace, *told, error=""):
    """An attempt of a second with a decode call, whose engine has told this: name, from and to in ms, facts."""
    start = trace.root.start_us
    attempt = trace.begin("attempt", number=len(trace.spans), sequence=0)
    call = trace.begin("decode", attempt, worker="decode")
    for span in (attempt, call):
        span.start_us, span.end_us, span.error = start, start + 1_000_000, error
    shown = [EngineSpan(name, start + 1000 * a, start + 1000 * b, facts) for name, a, b, facts in told]
    trace.hang(call, shown)
    trace.root.end_us = start + 1_000_000
    return {one.cause: one.ms for one in timeline_of(_kept(trace), 0).causes}


def test_every_millisecond_has_one_cause():
    generate = ("generate", 400, 900, {"tokens": 9, "neighbors_ms": 200.0})
    causes = spans_of(traced(), ("queue", 0, 100, {}), ("prefill_chunk", 100, 300, {"tokens": 5}), generate)
    assert causes == {"generation": 400, "neighbors": 200, "prompt": 200, "engine": 100, "queue": 100}
    assert sum(causes.values()) == 1000


def test_an_engine_that_told_nothing_leaves_the_time_to_itself():
    assert spans_of(traced()) == {"engine": 1000}


@pytest.mark.parametrize("num_prompts", [0, 3])
def test_engines_tell_of_others_prompts_alone(num_prompts):
    spans, work = EngineSpans(), PromptWork()
    work.note(5.0, 500)
    spans.begin_generation(work)
    for _ in range(num_prompts):
        work.note(0.5, 100)
    spans.add_generation(0.0, 2.0, 10, work)
    told = spans.spans[0].attributes
    assert told.get("neighbors_ms", 0) == 500 * num_prompts and told.get("neighbor_tokens", 0) == 100 * num_prompts


def test_the_launchs_own_probes_leave_nothing_behind():
    traces, timelines = Traces(Registry("frontend")), Timelines(10, 1 << 20)
    traces.subscribe(timelines.keep, wants_all=True, running=timelines)
    for is_canary in (True, False):
        trace = traces.begin("POST /v1/completions", traces.identify(), time.monotonic())
        trace.request_id, trace.is_canary = f"canary {is_canary}", is_canary
        traces.begun(trace)
        traces.end(trace)
    assert timelines._running == {} and list(timelines._kept) == [("", "canary False")]
