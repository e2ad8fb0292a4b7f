import json

import numpy as np
import pytest

from bireme.errors import NotFoundError, RequestCancelledError, RequestError, UnavailableError
from bireme.messages import (
    STUB,
    Encode,
    EncodeRequest,
    EncodeSource,
    EngineRequest,
    Finish,
    Release,
    SamplingParams,
    Submit,
    Usage,
    encode,
)
from bireme.multimodal.wire import EncodeAnswer, Encoded, encode_answer
from bireme.types import RequestInfo

HASH = "ab" * 32
ANSWER = EncodeAnswer(
    pictures=(Encoded(hash=HASH, num_tokens=64, hidden_size=192, handles=("signed",)),), embeddings=b"safetensors"
)


def finish(bench, answer=ANSWER):
    bench.engine.finish(STUB, 1, Finish("stop", Usage(), encoded=encode_answer(answer)))


async def test_pictures_go_to_the_engine_as_they_are(encoder):
    bench = await encoder()
    call = await bench.ask(images=[b"\x89PNG\xff", "https://example.com/a.png"]).begun()
    request = bench.engine.requests[STUB, 1]
    assert [one.content for one in request.sources] == [
        b"\x89PNG\xff",
        b"https://example.com/a.png",
    ]
    finish(bench)
    await call.end()


async def test_the_answer_names_hash_shape_and_handle(encoder):
    bench = await encoder()
    call = await bench.ask(images=["data:,x"]).begun()
    finish(bench)
    (response,) = await call.end()
    assert (response["shapes"], response["hashes"]) == ([[64, 192]], [HASH.encode()])
    picture = {"hash": HASH, "num_tokens": 64, "hidden_size": 192, "handles": ["signed"]}
    assert json.loads(response["embedding_handles"][0]) == {"v": 1, "pictures": [picture]}
    assert "embeddings" not in response


async def test_embeddings_come_along_when_asked_for(encoder):
    bench = await encoder()
    call = await bench.ask(images=["data:,x"], return_embeddings=True).begun()
    assert bench.engine.requests[STUB, 1].inline
    finish(bench)
    assert (await call.end())[0]["embeddings"] == [b"safetensors"]


async def test_a_pipeline_s_request_passes_whole(encoder):
    bench = await encoder()
    request = EncodeRequest(sources=(EncodeSource("embeddings", b"x"),), copies=3, timeout_ms=7)
    call = await bench.ask(engine_request=np.frombuffer(encode(Encode(0, request)), np.uint8)).begun()
    assert bench.engine.requests[STUB, 1] == request
    finish(bench)
    await call.end()


async def test_a_pipeline_s_release_reaches_the_engine(encoder):
    bench = await encoder()
    command = np.frombuffer(encode(Release(("one", "two"))), np.uint8)
    assert json.loads((await bench.ask(engine_request=command).end())[0]["embedding_handles"][0])["pictures"] == []
    assert bench.engine.released == ["one", "two"]


async def test_a_prompt_is_refused(encoder):
    bench = await encoder()
    command = Submit(0, EngineRequest(prompt=b"", sampling=SamplingParams()))
    with pytest.raises(RequestError, match="takes pictures, no prompts"):
        await bench.ask(engine_request=np.frombuffer(encode(command), np.uint8)).end()


async def test_the_client_s_time_limit_goes_along(encoder):
    bench = await encoder()
    call = await bench.ask(RequestInfo(timeout_ms=250), images=["data:,x"]).begun()
    assert bench.engine.requests[STUB, 1].timeout_ms == 250
    finish(bench)
    await call.end()


async def test_an_abort_stops_the_encode_by_its_name(encoder):
    bench = await encoder()
    call = await bench.ask(images=["data:,x"], request_id="mine").begun()
    await bench.ask(abort=True, request_id="mine").end()
    with pytest.raises(RequestCancelledError):
        await call.end()
    assert bench.engine.aborted == [(STUB, 1)]


async def test_an_abort_after_the_end_finds_nothing(encoder):
    bench = await encoder()
    call = await bench.ask(images=["data:,x"], request_id="mine").begun()
    finish(bench)
    await call.end()
    with pytest.raises(NotFoundError, match="mine is not under way"):
        await bench.ask(abort=True, request_id="mine").end()


async def test_a_client_that_leaves_aborts(encoder):
    bench = await encoder()
    call = await bench.ask(images=["data:,x"]).begun()
    call.cancelled.set()
    with pytest.raises(RequestCancelledError):
        await call.end()


async def test_a_lost_engine_is_an_error_to_try_again(encoder):
    bench = await encoder()
    call = await bench.ask(images=["data:,x"]).begun()
    bench.engine.die()
    with pytest.raises(UnavailableError, match="it died"):
        await call.end()
    with pytest.raises(UnavailableError, match="try again"):
        await bench.ask(images=["data:,x"]).end()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "neither of images and embeddings"),
        ({"images": ["a"], "embeddings": "b"}, "both of images and embeddings"),
        ({"images": np.zeros(0, object)}, "at least one"),
        ({"images": np.zeros(3, np.uint8)}, "send BYTES"),
        ({"pictures": np.zeros(1, np.uint8)}, "no such input"),
    ],
)
async def test_a_wrong_request_is_refused(encoder, values, message):
    with pytest.raises(RequestError, match=message):
        await (await encoder()).ask(**values).end()


async def test_a_ping_says_whether_the_engine_is_ready(encoder):
    bench = await encoder()
    assert (await bench.ask(ping=True).end())[0] == {"state": [b"ready"]}
    bench.engine.die()
    with pytest.raises(UnavailableError, match="being restarted; try again"):
        await bench.ask(ping=True).end()
