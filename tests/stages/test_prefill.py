"""prefill: the first token and signed params, or a clear error."""

import asyncio
import time

import msgspec
import numpy as np
import pytest

from bireme.errors import (
    EngineLostError,
    NotFoundError,
    RequestCancelledError,
    RequestError,
    ResourceExhaustedError,
    UnavailableError,
)
from bireme.messages import EngineRequest, EngineSpan, Finish, SamplingParams, Submit, Usage, encode
from bireme.metrics import Registry
from bireme.observability.traces import Traces
from bireme.workers.client import prefill_result
from tests.observability.span_trees import shown

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DONE = Finish("not_finished", Usage(prompt_tokens=2, prefill_ms=3.0), disaggregated_params=b"signed")


async def test_answer_has_params_first_token_and_usage(prefill):
    test = await prefill()
    call = await test.ask(input_ids=[1, 2]).begun()
    assert test.engine.requests[0, 1].request_type == "context_only"
    test.engine.emit(0, {1: 97})
    test.engine.finish(0, 1, DONE)
    [answer] = await call.end()
    assert answer["disaggregated_params"] == [b"signed"]
    assert answer["output_ids"] == [97]
    assert b'"prefill_ms":3.0' in answer["usage"][0]


async def test_log_probabilities_of_the_prompt_are_in_the_answer(prefill):
    test = await prefill()
    call = await test.ask(input_ids=[1, 2, 3], prompt_logprobs=[1]).begun()
    for push in ([], [[(2, -0.5, 1), (2, -0.5, 1)]]), ([97], [[(3, -1.0, 7), (2, -0.5, 1)]]):
        test.engine.sinks[1].push(push[0], None, push[1])
    test.engine.finish(0, 1, DONE)
    [answer] = await call.end()
    result = prefill_result({name: np.array(value) for name, value in answer.items()})
    assert result.prompt_logprobs == [[(2, -0.5, 1), (2, -0.5, 1)], [(3, -1.0, 7), (2, -0.5, 1)]]
    assert answer["prompt_log_probs"][0].startswith(b"[null,")


async def test_a_pipelines_request_travels_whole(prefill):
    test = await prefill()
    request = EngineRequest(prompt=b"\1\0\0\0", sampling=SamplingParams(logit_bias={5: 1.0}, max_tokens=9))
    await test.ask(engine_request=np.frombuffer(encode(Submit(0, request)), np.uint8), request_id="id").begun()
    assert test.engine.requests[0, 1].sampling == request.sampling


@pytest.mark.parametrize("payload", [b"\1\2\3", b"\x92\xa1s\xa1\xff", b"\x91\xa1\xff"])
async def test_garbage_instead_of_a_request_is_refused(prefill, payload):
    test = await prefill()
    with pytest.raises(RequestError, match="engine_request"):
        await test.ask(engine_request=np.frombuffer(payload, np.uint8)).end()


async def test_abort_while_it_runs_cancels_it(prefill):
    test = await prefill()
    call = await test.ask(input_ids=[1, 2], request_id="mine").begun()
    assert len(await test.ask(abort=True, request_id="mine").end()) == 1
    with pytest.raises(RequestCancelledError):
        await call.end()


async def test_abort_after_the_answer_frees_the_lease(prefill):
    test = await prefill()
    call = await test.ask(input_ids=[1, 2], request_id="mine").begun()
    test.engine.emit(0, {1: 97})
    test.engine.finish(0, 1, DONE)
    await call.end()
    await test.ask(abort=True, request_id="mine").end()
    assert test.engine.aborted == [(0, 1)]


async def test_a_lease_is_forgotten_with_its_time(prefill):
    transceiver = {"cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": 1}}
    workers = {
        "prefill": {"engine": "mocker", "engine_config": transceiver},
        "decode": {"engine": "mocker", "engine_config": transceiver},
    }
    test = await prefill(workers=workers)
    call = await test.ask(input_ids=[1, 2], request_id="mine").begun()
    test.engine.finish(0, 1, DONE)
    await call.end()
    await asyncio.sleep(0.01)
    with pytest.raises(NotFoundError):
        await test.ask(abort=True, request_id="mine").end()


async def test_abort_of_an_unknown_id_is_not_found(prefill):
    test = await prefill()
    with pytest.raises(NotFoundError):
        await test.ask(abort=True, request_id="theirs").end()


async def test_a_client_that_left_leaves_no_lease(prefill):
    test = await prefill()
    call = await test.ask(input_ids=[1, 2]).begun()
    test.engine.sinks[1].push((97,))
    sink = test.engine.sinks.pop(1)
    sink.finish(DONE)
    call.cancelled.set()
    with pytest.raises(RequestCancelledError):
        await call.end()
    assert (0, 1) in test.engine.aborted


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("RESOURCE_EXHAUSTED: queue full", ResourceExhaustedError),
        ("UNAVAILABLE: engine lost: died", EngineLostError),
        ("INVALID_ARGUMENT: prompt too long", RequestError),
    ],
)
async def test_engine_errors_keep_their_kind(prefill, error, kind):
    test = await prefill()
    call = await test.ask(input_ids=[1, 2]).begun()
    test.engine.finish(0, 1, Finish("error", Usage(), error=error))
    with pytest.raises(kind):
        await call.end()


async def test_params_of_another_prefill_are_refused(prefill):
    test = await prefill()
    request = EngineRequest(prompt=b"\1\0\0\0", sampling=SamplingParams(), disaggregated_params=b"x")
    with pytest.raises(RequestError, match="send them to decode"):
        await test.ask(engine_request=np.frombuffer(encode(Submit(0, request)), np.uint8)).end()


async def test_an_engine_that_is_not_ready_refuses(prefill):
    test = await prefill()
    test.engine.die()
    with pytest.raises(UnavailableError):
        await test.ask(input_ids=[1]).end()


async def test_a_ping_with_a_request_s_id_says_whether_this_stub_has_the_request(prefill):
    test = await prefill()
    await test.ask(input_ids=[1, 2], request_id="mine").begun()
    assert (await test.ask(ping=True, request_id="mine").end())[0] == {"state": [b"ready"]}
    with pytest.raises(NotFoundError, match="theirs is not under way"):
        await test.ask(ping=True, request_id="theirs").end()


async def test_a_ping_says_whether_the_engine_is_ready(prefill):
    test = await prefill()
    assert (await test.ask(ping=True).end())[0] == {"state": [b"ready"]}
    test.engine.die()
    with pytest.raises(UnavailableError, match="being restarted; try again"):
        await test.ask(ping=True).end()


async def test_a_pipeline_is_told_the_engines_spans(prefill):
    test = await prefill()
    request = EngineRequest(prompt=b"\1\0\0\0", sampling=SamplingParams(), traceparent=TRACEPARENT)
    call = await test.ask(engine_request=np.frombuffer(encode(Submit(0, request)), np.uint8)).begun()
    test.engine.emit(0, {1: 97})
    spans = [EngineSpan("queue", 1, 2), EngineSpan("prefill_chunk", 2, 3, {"tokens": 1})]
    test.engine.finish(0, 1, msgspec.structs.replace(DONE, spans=spans))
    [answer] = await call.end()
    assert prefill_result({name: np.array(value, object) for name, value in answer.items()}).spans == spans


async def test_a_client_of_prefill_has_a_trace_here_and_is_told_nothing(prefill):
    test = await prefill()
    read = []
    test.stage._traces = Traces(Registry("prefill"), 1.0)
    test.stage._traces.subscribe(read.append)
    call = await test.ask(input_ids=[1]).begun()
    assert test.engine.requests[0, 1].traceparent
    test.engine.emit(0, {1: 97})
    now_us = time.time_ns() // 1000
    test.engine.finish(0, 1, msgspec.structs.replace(DONE, spans=[EngineSpan("queue", now_us, now_us)]))
    [answer] = await call.end()
    assert "spans" not in answer and shown(read[0]) == ["prefill", "  queue"]
