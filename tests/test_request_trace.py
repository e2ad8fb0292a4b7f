"""The words of W3C Trace Context, and the tree that a request's entry keeps."""

import asyncio
import time

import pytest

from bireme.errors import UnavailableError
from bireme.messages import EngineSpan
from bireme.request_trace import (
    MAX_ENGINE_SPANS,
    MAX_TOKEN_TIMES,
    MAX_TRACESTATE_CHARACTERS,
    EngineSpans,
    RequestTrace,
    TokenTimes,
    clean_tracestate,
    error_text,
    parse_traceparent,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{SPAN}-01"


def make_trace(caller=None, is_sampled=True):
    return RequestTrace("generate", caller, is_sampled, time.monotonic())


def test_a_traceparent_names_trace_caller_and_sampling():
    caller = parse_traceparent(GIVEN)
    assert (caller.trace_id, caller.parent_id, caller.is_sampled) == (TRACE, int(SPAN, 16), True)
    assert not parse_traceparent(f"00-{TRACE}-{SPAN}-fe").is_sampled


@pytest.mark.parametrize("more", ["", "-", "-what-the-future-brings"])
def test_a_later_version_is_read_as_the_first(more):
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01{more}").trace_id == TRACE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "junk",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"{GIVEN}\n",
        f" {GIVEN}",
    ],
)
def test_what_is_none_is_refused(text):
    assert parse_traceparent(text) is None


def test_tracestate_is_kept_as_it_is():
    assert clean_tracestate("rojo=00f067aa0ba902b7, \tcongo=t61rcWkgMzE,") == "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"


@pytest.mark.parametrize("text", ["no member", "Rojo=1", "a=1,=2", "a=\u00e9", ",".join(f"a{i}=1" for i in range(33))])
def test_a_malformed_tracestate_is_dropped(text):
    assert clean_tracestate(text) == ""


def test_of_a_huge_tracestate_large_members_go_first_and_then_the_oldest():
    members = [f"a{i}={'x' * 90}" for i in range(8)]
    members[1] = f"b={'y' * 200}"
    kept = clean_tracestate(",".join(members)).split(",")
    assert len(",".join(kept)) <= MAX_TRACESTATE_CHARACTERS and kept == [members[0], *members[2:6]]
    assert clean_tracestate("z=" + "1" * 1_000_000) == ""


def test_a_trace_belongs_to_its_caller_and_names_its_own_spans_to_others():
    trace = make_trace(parse_traceparent(GIVEN))
    assert (trace.trace_id, trace.root.parent_id) == (TRACE, int(SPAN, 16))
    told = parse_traceparent(trace.traceparent(trace.root))
    assert told == (TRACE, trace.root.span_id, 1)
    assert not parse_traceparent(make_trace(is_sampled=False).traceparent(trace.root)).is_sampled


def test_the_end_of_a_trace_ends_what_has_no_end():
    trace = make_trace()
    done, left = trace.begin("tokenize"), trace.begin("attempt")
    trace.end(done)
    trace.finish("UNAVAILABLE: gone")
    assert (done.error, left.error, trace.root.error) == ("", "UNAVAILABLE: gone", "UNAVAILABLE: gone")
    assert all(span.end_us >= span.start_us for span in trace.spans)


def test_a_span_says_what_ended_it():
    trace = make_trace()
    with pytest.raises(UnavailableError), trace.span("embed", worker="embedding"):
        raise UnavailableError("no worker")
    assert (trace.spans[-1].error, trace.spans[-1].attributes) == ("UNAVAILABLE: no worker", {"worker": "embedding"})
    assert error_text(asyncio.CancelledError()).startswith("CANCELLED: ")


@pytest.mark.parametrize("skew_us", [0, 5_000_000, -5_000_000])
def test_an_engines_spans_lie_within_its_call_whatever_its_clock_says(skew_us):
    trace = make_trace()
    call = trace.begin("decode")
    time.sleep(0.002)
    trace.end(call)
    start = call.start_us + 100 + skew_us
    trace.hang(call, [EngineSpan("queue", start, start + 200), EngineSpan("generate", start + 200, start + 900)])
    queue, generate = trace.spans[-2:]
    assert call.start_us <= queue.start_us <= queue.end_us == generate.start_us <= generate.end_us <= call.end_us
    assert {queue.parent_id, generate.parent_id} == {call.span_id}
    assert generate.end_us - queue.start_us == 900


def test_an_engine_tells_a_bounded_number_of_spans():
    spans = EngineSpans()
    for step in range(MAX_ENGINE_SPANS + 10):
        spans.add("prefill_chunk", 1.0, 2.0, step=step)
    spans.add("generate", 2.0, 3.0)
    assert len(spans.spans) == MAX_ENGINE_SPANS and spans.spans[-1].name == "generate"
    assert spans.spans[0].end_us - spans.spans[0].start_us == 1_000_000


def test_token_times_are_bounded_and_count_all_tokens():
    times = TokenTimes()
    for at in range(MAX_TOKEN_TIMES + 5):
        times.note(at, 2)
    assert len(times.times_us) == MAX_TOKEN_TIMES and sum(times.counts) == 2 * (MAX_TOKEN_TIMES + 5)
    assert times.times_us[-1] == MAX_TOKEN_TIMES + 4
