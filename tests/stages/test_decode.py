"""Plain requests of decode."""

import asyncio
import time

import numpy as np
import pytest

from bireme.errors import EngineLostError, NotFoundError, RequestCancelledError, RequestError, UnavailableError
from bireme.messages import EngineSpan, Finish, Usage
from bireme.metrics import Registry
from bireme.observability.traces import Traces
from bireme.types import RequestInfo
from tests.observability.span_trees import shown

DONE = Finish("length", Usage(prompt_tokens=2, completion_tokens=2))


async def test_tokens_and_text_go_out_as_they_come(decode):
    test = await decode()
    call = await test.ask(input_ids=[1, 2], max_tokens=2).begun()
    test.engine.emit(0, {1: 97})
    assert call.responses[0]["output_ids"] == [97]
    assert call.responses[0]["text_output"] == [b"a"]
    test.engine.finish(0, 1, DONE)
    assert (await call.end())[-1]["finish_reason"] == [b"length"]


async def test_sampling_tensors_reach_the_engine(decode):
    test = await decode()
    await test.ask(RequestInfo(timeout_ms=500), input_ids=[1], temperature=0.5, bad_words=["a"], priority=0.9).begun()
    request = test.engine.requests[0, 1]
    assert request.sampling.temperature == 0.5
    assert (97,) in request.sampling.bad_token_ids
    assert request.timeout_ms == 500
    assert request.options.priority == pytest.approx(0.9)
    assert request.sampling.seed is not None


async def test_disaggregated_params_make_it_generation_only(decode):
    test = await decode()
    await test.ask(input_ids=[1, 2], disaggregated_params=b"signed").begun()
    request = test.engine.requests[0, 1]
    assert request.request_type == "generation_only"
    assert request.disaggregated_params == b"signed"


async def test_resumed_tokens_count_but_their_text_is_not_sent_again(decode):
    test = await decode()
    call = await test.ask(input_ids=[1, 2], resumed_output_ids=[97, 98]).begun()
    assert test.engine.requests[0, 1].num_resumed == 2
    test.engine.emit(0, {1: 99})
    assert call.responses[0]["text_output"] == [b"c"]


async def test_client_that_goes_away_aborts_in_the_engine(decode):
    test = await decode()
    call = await test.ask(input_ids=[1, 2]).begun()
    call.cancelled.set()
    with pytest.raises(RequestCancelledError):
        await call.end()
    assert test.engine.aborted == [(0, 1)]


async def test_abort_by_request_id_stops_the_request(decode):
    test = await decode()
    call = await test.ask(input_ids=[1, 2], request_id="mine").begun()
    await test.ask(abort=True, request_id="mine").end()
    with pytest.raises(RequestCancelledError):
        await call.end()


async def test_abort_of_an_unknown_id_is_not_found(decode):
    test = await decode()
    with pytest.raises(NotFoundError, match="theirs is not under way"):
        await test.ask(abort=True, request_id="theirs").end()


async def test_a_request_id_in_use_is_refused(decode):
    test = await decode()
    await test.ask(input_ids=[1, 2], request_id="mine").begun()
    with pytest.raises(RequestError, match="is in use"):
        await test.ask(input_ids=[1, 2], request_id="mine").end()


async def test_an_id_is_free_again_after_the_end(decode):
    test = await decode()
    call = await test.ask(input_ids=[1, 2], request_id="mine").begun()
    test.engine.finish(0, 1, DONE)
    await call.end()
    await test.ask(input_ids=[1, 2], request_id="mine").begun()
    assert (0, 2) in test.engine.requests


async def test_engine_death_ends_the_stream_with_unavailable(decode):
    test = await decode()
    call = await test.ask(input_ids=[1, 2]).begun()
    test.engine.die()
    with pytest.raises(EngineLostError):
        await call.end()


async def test_an_engine_that_is_not_ready_refuses(decode):
    test = await decode()
    test.engine.die()
    with pytest.raises(UnavailableError, match="being restarted"):
        await test.ask(input_ids=[1, 2]).end()


async def test_stop_string_aborts_even_from_within_submit(decode):
    test = await decode()
    call = await test.ask(input_ids=[1, 2], stop_words=["b"]).begun()
    test.engine.emit(0, {1: 97})
    test.engine.emit(0, {1: 98})
    assert (await call.end())[-1]["finish_reason"] == [b"stop"]
    assert test.engine.aborted == [(0, 1)]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "input_ids: missing"),
        ({"input_ids": np.zeros(0, np.int32)}, "0 tokens"),
        ({"input_ids": [-1]}, "token id -1"),
        ({"input_ids": [1], "max_tokens": 0}, "max_tokens: 0"),
        ({"input_ids": [1], "num_return_sequences": 2}, "one sequence a request"),
        ({"input_ids": np.array([1.5], np.float32)}, "data type float32; send INT32"),
        ({"input_ids": [1], "nonsense": 1}, "no such input"),
        ({"subscribe": b"listen"}, "send open, or keep or close"),
        ({"commands": [1]}, "consumer: missing"),
        ({"consumer": b"me"}, "commands: missing"),
        ({"abort": True}, "without request_id"),
    ],
)
async def test_malformed_requests_say_what_to_send(decode, values, text):
    test = await decode()
    with pytest.raises(RequestError, match=text):
        await test.ask(**values).end()


async def test_stop_ends_subscriptions_and_the_engine(decode):
    test = await decode()
    call = await test.ask(subscribe=b"open").begun()
    await test.stage.stop()
    with pytest.raises(UnavailableError, match="shutting down"):
        await call.end()
    assert test.engine.is_stopped
    await asyncio.sleep(0)


async def test_a_ping_says_whether_the_engine_is_ready(decode):
    test = await decode()
    assert (await test.ask(ping=True).end())[0] == {"state": [b"ready"]}
    test.engine.die()
    with pytest.raises(UnavailableError, match="being restarted; try again"):
        await test.ask(ping=True).end()


async def test_a_client_of_decode_has_a_trace_here_whatever_ends_it(decode):
    test, read = await decode(), []
    test.stage._traces = Traces(Registry("decode"), 1.0)
    test.stage._traces.subscribe(read.append)
    call = await test.ask(input_ids=[1, 2]).begun()
    assert test.engine.requests[0, 1].traceparent
    now_us = time.time_ns() // 1000
    told = [EngineSpan("queue", now_us, now_us), EngineSpan("generate", now_us, now_us)]
    test.engine.finish(0, 1, Finish("error", Usage(), "UNAVAILABLE: engine lost: it died", spans=told))
    with pytest.raises(EngineLostError):
        await call.end()
    assert shown(read[0]) == ["decode", "  queue", "  generate"] and "it died" in read[0].root.error
