"""Which requests are traced, and who is given a trace that has ended."""

import time

from bireme.errors import UnavailableError
from bireme.metrics import Registry
from bireme.observability.traces import Traces, begin_trace
from bireme.types import Inputs, RequestInfo

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{}"


def begin(traces, traceparent=""):
    return traces.begin("generate", traces.identify(traceparent), time.monotonic())


def reading(ratio=None, **wants):
    traces, read = Traces(Registry("frontend"), ratio), []
    traces.subscribe(read.append, **wants)
    return traces, read


def test_the_caller_decides_whether_its_trace_is_sampled():
    traces, _ = reading(0.0)
    assert begin(traces) is None and begin(traces, GIVEN.format("00")) is None
    trace = begin(traces, GIVEN.format("01"))
    assert trace.is_sampled and trace.trace_id == "0af7651916cd43dd8448eb211c80319c"


def test_a_share_of_the_traces_that_begin_here_is_sampled():
    traces, _ = reading(0.25)
    count = sum(begin(traces) is not None for _ in range(4000))
    assert 800 < count < 1200


def test_nothing_is_sampled_where_nothing_is_exported():
    traces, _ = reading(None)
    assert begin(traces) is None and begin(traces, GIVEN.format("01")) is None


def test_a_reader_of_everything_gets_what_is_not_sampled():
    traces, read = reading(0.0, wants_all=True, wants_token_times=True)
    trace = begin(traces)
    traces.end(trace)
    assert read == [trace] and not trace.is_sampled and trace.keeps_token_times


def test_an_ended_trace_goes_to_each_reader_though_one_fails(caplog):
    traces, read = Traces(Registry("frontend"), 1.0), []

    def fail(trace):
        raise ValueError("no disk")

    traces.subscribe(fail)
    traces.subscribe(read.append)
    trace = begin(traces)
    traces.end(trace, UnavailableError("no worker"))
    assert read == [trace] and trace.root.error == "UNAVAILABLE: no worker"
    assert f"trace_reader_failed trace_id={trace.trace_id}" in caplog.text


def test_the_launchs_own_probes_are_given_to_nobody():
    traces, read = reading(1.0)
    trace = begin(traces)
    trace.is_canary = True
    traces.end(trace)
    assert read == []


def test_a_malformed_traceparent_begins_a_trace_and_is_counted():
    registry = Registry("frontend")
    traces = Traces(registry, 1.0)
    assert traces.identify("junk").caller is None
    assert traces.identify("").caller is None
    assert [(name, value) for name, _, value in registry.take_delta().counters] == [
        ("bireme_traceparents_ignored_total", 1)
    ]


def test_request_parameters_name_the_caller_of_a_model():
    traces, _ = reading(0.0)
    info = RequestInfo("mine", {"traceparent": GIVEN.format("01"), "tracestate": "a=1"})
    trace = begin_trace(traces, "generate", Inputs({}, info), time.monotonic())
    assert (trace.request_id, trace.tracestate) == ("mine", "a=1")
    assert begin_trace(traces, "generate", Inputs({}, RequestInfo("", {"traceparent": 7})), time.monotonic()) is None


async def test_readers_are_closed_off_the_loop():
    traces, read = Traces(Registry("frontend"), 1.0), []
    traces.subscribe(read.append, close=lambda: read.append("closed"))
    await traces.close()
    assert read == ["closed"]
