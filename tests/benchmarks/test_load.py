"""The load clients see every token that is lost, repeated, reordered or another stream's."""

import asyncio
from array import array

import pytest

from benchmarks.load.grpc_streams import GrpcStreams
from benchmarks.load.http_streams import ChunkedBody, HttpStreams
from benchmarks.load.meter import LoadError, Meter, Trace, percentile
from benchmarks.load.runner import LoadPlan, Runner

PLAN = LoadPlan(streams=4, seconds=0.3, warmup_s=0.05, drain_s=5)


def trace_of(workload):
    return Trace(Meter(), workload.prompts[0])


def test_a_right_answer_passes(workload):
    trace = trace_of(workload)
    for token in trace.prompt.expected:
        trace.push(array("i", [token]), b"<%d>" % token)
    trace.finish("length")
    assert trace.count == len(trace.prompt.expected) and not trace.meter.errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:2] + t[3:], "tokens are missing"),
        (lambda t: t[:3] + t[2:], "came again"),
        (lambda t: t[:2] + [t[3], t[2]] + t[4:], "tokens are missing"),
        (lambda t: t[:2] + [5000] + t[3:], "belongs to no place"),
        (lambda t: [*t, t[-1]], "more than asked for"),
        (lambda t: t[:-1], "ended with 'length' after 5 of 6"),
    ],
)
def test_a_wrong_answer_is_named(workload, change, message):
    trace = trace_of(workload)
    with pytest.raises(LoadError, match=message):
        trace.push(array("i", change(list(trace.prompt.expected))))
        trace.finish("length")


def test_a_text_that_is_not_the_tokens_is_found(workload):
    trace = trace_of(workload)
    trace.push(trace.prompt.expected, b"something else")
    with pytest.raises(LoadError, match="text is not that of the tokens"):
        trace.finish("length")


def test_a_percentile_of_nothing_is_none():
    assert percentile([], 0.5) is None
    assert percentile([1, 2, 3, 4], 0.5) == 3
    assert percentile([1, 2, 3, 4], 1.0) == 4


@pytest.mark.parametrize("stream_per_request", [False, True])
async def test_grpc_streams_run_a_closed_loop(grpc_server, workload, stream_per_request):
    client = GrpcStreams(grpc_server.target, "decode", stream_per_request)
    meter = await Runner(client, workload, PLAN).run()
    assert meter.requests > 4 and not meter.errors
    assert meter.tokens >= 6 * (meter.requests - PLAN.streams)


async def test_grpc_streams_report_a_lost_token(grpc_server, workload):
    grpc_server.spoil = lambda tokens: tokens[:1] + tokens[2:]
    meter = await Runner(GrpcStreams(grpc_server.target, "decode"), workload, PLAN).run()
    assert list(meter.errors) == ["tokens are missing before one that is expected later"]


async def test_dropped_grpc_requests_are_cancelled_and_no_errors(grpc_server, workload):
    grpc_server.delay_s = 0.02
    plan = LoadPlan(streams=4, seconds=0.6, warmup_s=0, drop_share=1.0)
    meter = await Runner(GrpcStreams(grpc_server.target, "decode", True), workload, plan).run()
    assert meter.dropped > 4 and not meter.errors
    assert grpc_server.cancelled > 0


async def test_a_request_without_news_fails(grpc_server, workload):
    grpc_server.delay_s = 60
    plan = LoadPlan(streams=1, seconds=2.5, warmup_s=0, stall_s=0.1, drain_s=3)
    meter = await Runner(GrpcStreams(grpc_server.target, "decode"), workload, plan).run()
    assert meter.errors["no news for too long"] >= 1


async def test_a_server_that_is_not_there_is_an_error(workload):
    meter = await Runner(GrpcStreams("127.0.0.1:1", "decode"), workload, PLAN).run()
    assert list(meter.errors) == ["no connection: ConnectionRefusedError"]


async def test_http_streams_run_a_closed_loop(http_server, workload):
    meter = await Runner(HttpStreams(http_server.target), workload, PLAN).run()
    assert meter.requests > 4 and not meter.errors


async def test_http_streams_report_a_repeated_token(http_server, workload):
    http_server.spoil = lambda tokens: tokens[:1] + tokens
    meter = await Runner(HttpStreams(http_server.target), workload, PLAN).run()
    assert list(meter.errors) == ["a token came again or late"]


async def test_dropped_http_requests_are_no_errors(http_server, workload):
    http_server.delay_s = 0.02
    plan = LoadPlan(streams=4, seconds=0.6, warmup_s=0, drop_share=1.0)
    meter = await Runner(HttpStreams(http_server.target), workload, plan).run()
    assert meter.dropped > 4 and not meter.errors


@pytest.mark.parametrize("cut", range(1, 20))
def test_chunks_are_joined_however_they_are_cut(cut):
    data = b"5\r\nhello\r\nb\r\n\r\nworld\r\n!!\r\n0\r\n\r\n"
    body = ChunkedBody()
    assert body.feed(data[:cut]) + body.feed(data[cut:]) == b"hello\r\nworld\r\n!!"
    assert body.is_complete


async def test_a_drop_after_the_last_token_does_no_harm(grpc_server, workload):
    client = GrpcStreams(grpc_server.target, "decode", stream_per_request=True)
    trace = trace_of(workload)
    request = asyncio.create_task(client.request(0, trace))
    while trace.count < 6:
        await asyncio.sleep(0)
    client.drop(0)
    await asyncio.wait_for(request, 5)
    assert trace.count == 6
    await asyncio.wait_for(client.request(0, again := trace_of(workload)), 5)  # the stream can be used again
    assert again.count == 6
    await client.close()


async def test_an_idle_connection_that_the_server_has_closed_costs_no_request(http_server, workload):
    client = HttpStreams(http_server.target)
    await client.request(0, trace_of(workload))
    client._connections[0]._transport.abort()
    client._connections[0].is_closed = False  # the close is not known yet when the next request is sent
    await asyncio.wait_for(client.request(0, again := trace_of(workload)), 5)
    assert again.count == 6
    await client.close()
