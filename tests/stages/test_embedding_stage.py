import numpy as np
import pytest

from bireme.errors import NotFoundError, RequestCancelledError, RequestError, UnavailableError
from bireme.messages import STUB, Embed, EmbedRequest, EncodeRequest, Finish, Usage, encode, start_command
from bireme.metrics import Registry
from bireme.observability.traces import Traces
from bireme.types import RequestInfo
from tests.observability.span_trees import shown

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROWS = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def prompts(bench):
    return [np.frombuffer(prompt, "<i4").tolist() for prompt in bench.engine.requests[STUB, 1].prompts]


def finish(bench, rows=ROWS):
    bench.engine.finish(STUB, 1, Finish("stop", Usage(), encoded=rows.tobytes()))


async def test_texts_go_to_the_engine_as_ids_and_come_back_as_rows(embedding):
    bench = await embedding()
    call = await bench.ask(RequestInfo(timeout_ms=250), text_input=["a", "b"], dimensions=2).begun()
    request = bench.engine.requests[STUB, 1]
    assert (prompts(bench), request.dimensions, request.timeout_ms) == ([[97], [98]], 2, 250)
    finish(bench)
    assert await call.end() == [{"embedding": ROWS.tolist(), "num_tokens": [1, 1]}]


async def test_a_client_of_embedding_has_a_trace_here_and_a_frontend_has_its_own(embedding):
    bench, read = await embedding(), []
    bench.stage._traces = Traces(Registry("embedding"), 1.0)
    bench.stage._traces.subscribe(read.append)
    call = await bench.ask(RequestInfo(parameters={"traceparent": TRACEPARENT}), text_input=["a", "b"]).begun()
    finish(bench)
    await call.end()
    with pytest.raises(RequestError):
        await bench.ask(text_input=["a", ""]).end()
    assert [shown(trace) for trace in read] == [["embedding"], ["embedding"]]
    assert read[0].trace_id == TRACEPARENT.split("-")[1] and read[0].root.attributes == {"texts": 2, "tokens": 2}
    assert read[0].root.error == "" and read[1].root.error.startswith("INVALID_ARGUMENT: text_input[1]: empty")
    request = EmbedRequest(prompts=(b"\1\0\0\0", b"\2\0\0\0"))
    call = await bench.ask(engine_request=np.frombuffer(encode(Embed(0, request)), np.uint8)).begun()
    bench.engine.finish(STUB, 2, Finish("stop", Usage(), encoded=ROWS.tobytes()))
    await call.end()
    assert len(read) == 2


async def test_ids_of_several_texts_are_told_apart_by_their_lengths(embedding):
    bench = await embedding()
    call = await bench.ask(input_ids=[5, 6, 7], input_lengths=[1, 2]).begun()
    assert prompts(bench) == [[5], [6, 7]]
    finish(bench)
    assert (await call.end())[0]["num_tokens"] == [1, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "neither of text_input and input_ids"),
        ({"text_input": "a", "input_ids": [1]}, "both of text_input and input_ids"),
        ({"text_input": ["a", ""]}, r"text_input\[1\]: empty"),
        ({"input_ids": [1, 2], "input_lengths": [1]}, r"input_lengths: \[1\]; one a text"),
        ({"input_ids": [1, 2], "input_lengths": [2, 0]}, "at least 1"),
        ({"input_ids": [1], "prompt_name": "query"}, "prompt_name: not together with token ids"),
        ({"text_input": "a", "prompt_name": "query"}, "prompts of this model: it has none"),
        ({"engine_request": np.frombuffer(encode(start_command(0, EncodeRequest(sources=()))), np.uint8)}, "frontends"),
    ],
)
async def test_what_can_not_be_embedded_is_refused_by_name(embedding, values, message):
    bench = await embedding()
    with pytest.raises(RequestError, match=message):
        await bench.ask(**values).end()


async def test_a_frontend_s_request_passes_whole(embedding):
    bench = await embedding()
    request = EmbedRequest(prompts=(b"\1\0\0\0", b"\2\0\0\0"), dimensions=2, timeout_ms=7)
    call = await bench.ask(engine_request=np.frombuffer(encode(Embed(0, request)), np.uint8)).begun()
    assert bench.engine.requests[STUB, 1] == request
    finish(bench)
    await call.end()


async def test_an_abort_stops_it_by_its_name_once(embedding):
    bench = await embedding()
    call = await bench.ask(text_input="a", request_id="mine").begun()
    await bench.ask(abort=True, request_id="mine").end()
    with pytest.raises(RequestCancelledError):
        await call.end()
    with pytest.raises(NotFoundError, match="mine is not under way"):
        await bench.ask(abort=True, request_id="mine").end()


async def test_a_lost_engine_is_an_error_to_try_again(embedding):
    bench = await embedding()
    call = await bench.ask(text_input="a").begun()
    bench.engine.die()
    with pytest.raises(UnavailableError, match="it died"):
        await call.end()
    with pytest.raises(UnavailableError, match="try again"):
        await bench.ask(ping=True).end()
