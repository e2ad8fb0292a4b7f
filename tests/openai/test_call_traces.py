"""What the frontend's traces tell, whichever API is asked."""

import asyncio
import json
import logging

import pytest

from bireme.errors import BiremeError, ResourceExhaustedError
from bireme.metrics import Registry
from bireme.observability.traces import Traces
from tests.observability.span_trees import check_tree, shown
from tests.openai.batch.forms import upload
from tests.openai.conftest import Reply

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "a=1"}
ANSWERED = ["  tokenize", "  attempt", "    route", "    decode", "      queue", "      generate"]
USER = [{"role": "user", "content": "hi"}]
CHAT = {"messages": USER, "max_tokens": 4}
APIS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
}


def reading(ratio=1.0, **wants):
    traces, read = Traces(Registry("frontend"), ratio), []
    traces.subscribe(read.append, **wants)
    return traces, read


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_each_api_is_one_tree_from_the_caller_to_the_engine(frontend, path, stream):
    traces, read = reading()
    bench = await frontend(traces=traces)
    reply = bench.call("POST", path, {"model": "test", "stream": stream} | APIS[path], CALLER)
    await bench.workers.emit(4)
    await reply.end()
    [trace] = read
    check_tree(trace)
    assert shown(trace) == [f"POST {path}", *ANSWERED, *(["  deliver"] if stream else [])]
    assert (trace.trace_id, trace.root.parent_id, trace.tracestate) == (TRACE, 0xB7AD6B7169203331, "a=1")
    facts = trace.root.attributes
    assert (facts["http.response.status_code"], facts["gen_ai.request.model"]) == (200, "test")
    assert facts["gen_ai.usage.output_tokens"] == 4 and trace.root.error == ""


async def test_the_reply_and_the_log_name_the_trace(frontend, caplog):
    caplog.set_level(logging.INFO, "bireme.access")
    traces, read = reading()
    bench = await frontend(traces=traces)
    reply = bench.chat(CALLER)
    await bench.workers.emit(4)
    await reply.end()
    assert reply.headers["traceresponse"] == read[0].traceparent(read[0].root)
    assert f"trace_id={TRACE}" in caplog.text


async def test_a_request_that_is_not_sampled_is_told_its_id_and_costs_no_spans(frontend):
    traces, read = reading(0.0)
    bench = await frontend(traces=traces)
    reply = bench.chat({"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"})
    await bench.workers.reached("decode")
    assert bench.workers.running[0].request.traceparent == ""
    await bench.workers.emit(4)
    await reply.end()
    version, trace_id, _, flags = reply.headers["traceresponse"].split("-")
    assert (version, trace_id, flags, read) == ("00", TRACE, "00", [])


async def test_without_traces_a_traceparent_changes_nothing(frontend):
    bench = await frontend()
    reply = bench.chat(CALLER)
    await bench.workers.emit(4)
    assert "traceresponse" not in (await reply.end()).headers


async def test_two_traceparents_are_none(frontend):
    traces, read = reading()
    bench = await frontend(traces=traces)
    named = [(b"traceparent", CALLER["traceparent"].encode())] * 2
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), *named]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    await Reply(bench.app, scope, [b"{}"], True).end()
    assert read[-1].trace_id != TRACE


async def test_an_error_is_the_trees_end_and_says_what_the_client_was_told(frontend):
    traces, read = reading()
    bench = await frontend(traces=traces)
    bench.workers.errors.append(ResourceExhaustedError("queue: 8 requests wait"))
    assert (await bench.chat().end()).status == 503
    assert (await bench.chat(max_tokens=-1).end()).status == 400
    assert [trace.root.error.partition(":")[0] for trace in read] == ["RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"]
    check_tree(read[0])


async def test_a_client_that_leaves_is_told_apart(frontend):
    traces, read = reading()
    bench = await frontend(traces=traces)
    reply = bench.chat(stream=True)
    await bench.workers.emit()
    reply.leave()
    await reply.end()
    check_tree(read[0])
    errors = {span.name: span.error.partition(":")[0] for span in read[0].spans if span.error}
    assert errors["POST /v1/chat/completions"] == errors["decode"] == "CANCELLED"


@pytest.mark.parametrize("is_body_coming", [True, False])
async def test_a_client_that_leaves_before_the_reply_is_what_ended_its_tree(frontend, is_body_coming):
    traces, read = reading()
    bench = await frontend(traces=traces)
    body = {"model": "test"} | CHAT if is_body_coming else (b'{"model": ',)
    reply = bench.call("POST", "/v1/chat/completions", body, is_body_coming=is_body_coming)
    await asyncio.sleep(0.01)
    reply.leave()
    await reply.end()
    check_tree(read[0])
    root = read[0].root
    assert root.attributes["http.response.status_code"] == 499 and root.error.startswith(
        "CANCELLED: its caller is gone"
    )


async def test_a_slow_reader_shows_in_the_delivery(frontend):
    traces, read = reading()
    bench = await frontend(traces=traces)
    reply = bench.chat(stream=True)
    await bench.workers.emit()
    reply.stop_reading()
    await bench.workers.emit(3)
    await asyncio.sleep(0.05)
    reply.go_on_reading()
    await reply.end()
    [deliver] = [span for span in read[0].spans if span.name == "deliver"]
    assert deliver.attributes["waited_ms"] >= 40


async def test_paths_that_compute_nothing_are_not_traced(frontend):
    traces, read = reading()
    bench = await frontend(traces=traces)
    reply = await bench.call("GET", "/v1/models", headers=CALLER).end()
    assert "traceresponse" not in reply.headers and read == []


async def test_lines_of_a_batch_have_trees_of_their_own_that_name_its_creation(frontend):
    traces, read = reading()
    bench = await frontend(traces=traces)
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "test"} | CHAT}
    content = b"".join(json.dumps(line | {"custom_id": str(number)}).encode() + b"\n" for number in range(2))
    file = (await upload(bench, content)).json()
    body = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
    assert (await bench.call("POST", "/v1/batches", body, CALLER).end()).status == 200
    while len(read) < 3:
        for generation in list(bench.workers.running):
            generation.emit()
        await asyncio.sleep(0.001)
    roots = {trace.trace_id: trace.root.name for trace in read}
    [made] = [trace for trace in read if trace.root.name == "POST /v1/batches"]
    answered = [trace for trace in read if trace.root.name == "POST /v1/chat/completions"]
    assert len(roots) == 3 and made.trace_id == TRACE
    for trace in answered:
        check_tree(trace)
        assert trace.links == [(TRACE, made.root.span_id)] and "attempt" in {span.name for span in trace.spans}


async def test_a_background_response_has_a_tree_of_its_own_that_names_its_request(frontend):
    traces, read = reading()
    bench = await frontend(traces=traces)
    body = {"model": "test", "input": "hi", "max_output_tokens": 4, "background": True}
    queued = await bench.call("POST", "/v1/responses", body, CALLER).end()
    await bench.workers.emit(4)
    while len(read) < 2:
        await asyncio.sleep(0.01)
    asked, answered = read
    check_tree(answered)
    assert shown(answered) == ["background /v1/responses", *ANSWERED]
    assert answered.links == [(TRACE, asked.root.span_id)] and answered.trace_id != TRACE
    assert answered.root.attributes == {"response": queued.json()["id"]} and answered.root.error == ""


async def test_a_failure_is_logged_with_the_trace_s_id(frontend, caplog):
    traces, read = reading()
    bench = await frontend(traces=traces)
    bench.workers.errors.append(BiremeError("a defect"))
    assert (await bench.chat(CALLER | {"x-request-id": "mine"}).end()).status == 500
    assert f"request_failed request_id=mine trace_id={TRACE} error=a defect" in caplog.text
    assert read[0].root.error == "INTERNAL: a defect"
