"""What a request leaves behind in the frontend's memory, however it ends: nothing that waits for the collector."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from pathlib import Path

import pytest
import yaml

from bireme.errors import BiremeError, EngineLostError, RequestError, ResourceExhaustedError, UnavailableError
from bireme.workers.base import UnreachableError
from tests.openai.frontend_process import frontend_server

TIMES = 100
PAIR = {"decode": {"engine": "mocker"}, "prefill": {"engine": "mocker"}}
PIPELINE = {"migration_limit": 1, "stall_timeout_s": 0.01}
SETTINGS = {"limits": {"max_prompt_tokens": 50}, "pipeline": PIPELINE}


async def refused(bench, **fields):
    reply = await bench.chat(**fields).end()
    assert 400 <= reply.status < 500


async def failed(bench, kind, num_tokens=0, times=1, **fields):
    """Have the engine fail every sequence after some tokens, `times` one after the other."""
    workers, n = bench.workers, fields.get("n", 1)
    reply = bench.chat(**fields)
    for _ in range(times):
        while len(workers.running) < n:
            await asyncio.sleep(0)
        for _ in range(num_tokens):
            for generation in list(workers.running):
                generation.emit()
            await asyncio.sleep(0)
        for generation in list(workers.running):
            generation.fail(kind("x: bad"))
    await reply.end()


async def left(bench, **fields):
    reply = bench.chat(**fields)
    while not bench.workers.running:
        await asyncio.sleep(0)
    reply.leave()
    await reply.end()
    while bench.workers.running:
        await asyncio.sleep(0)


async def prefill_failed(bench, kind):
    bench.workers.down["prefill"] = kind("x: bad")
    await bench.chat().end()


async def num_left_behind(act):
    """Return how many objects of a hundred requests only the collector could free."""
    await act()  # what is made once is made now
    gc.disable()
    gc.freeze()  # what is there is not looked through, which takes a second of a process with torch
    try:
        for _ in range(TIMES):
            await act()
        await asyncio.sleep(0.01)
        return gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()


REFUSED = {
    "a wrong field": {"temperature": 9},
    "an unknown model": {"model": "x"},
    "a prompt that is too long": {"messages": [{"role": "user", "content": "x" * 200}]},
    "a long one, encoded on a thread": {"messages": [{"role": "user", "content": "x" * 9000}]},
    "a long one, streamed": {"messages": [{"role": "user", "content": "x" * 9000}], "stream": True},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_request_leaves_nothing(frontend, name):
    bench = await frontend(**SETTINGS)
    assert await num_left_behind(lambda: refused(bench, **REFUSED[name])) < TIMES


async def test_a_body_that_is_too_large_leaves_nothing(frontend):
    bench = await frontend(frontend={"max_body_bytes": 100})
    assert await num_left_behind(lambda: bench.call("POST", "/tokenize", b"x" * 101).end()) < TIMES


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("kind", [RequestError, BiremeError])
async def test_a_request_that_fails_in_the_engine_leaves_nothing(frontend, kind, num_tokens, n, stream):
    bench = await frontend(**SETTINGS)
    act = lambda: failed(bench, kind, num_tokens, n=n, stream=stream)  # noqa: E731
    assert await num_left_behind(act) < TIMES


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [UnreachableError, ResourceExhaustedError])
async def test_a_request_without_an_engine_leaves_nothing(frontend, kind, n):
    bench = await frontend(**SETTINGS)
    assert await num_left_behind(lambda: failed(bench, kind, n=n)) < TIMES


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_moves_until_it_may_not_leaves_nothing(frontend, stream):
    bench = await frontend(**SETTINGS)
    act = lambda: failed(bench, EngineLostError, times=2, stream=stream)  # noqa: E731
    assert await num_left_behind(act) < TIMES


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_all_along(frontend, stream):
    bench = await frontend(**SETTINGS)
    assert await num_left_behind(lambda: left(bench, stream=stream)) < TIMES


@pytest.mark.parametrize("kind", [RequestError, UnavailableError])
async def test_a_prefill_that_fails_leaves_nothing(frontend, kind):
    bench = await frontend(workers=PAIR, pipeline=PIPELINE | {"enforce_disaggregation": True})
    assert await num_left_behind(lambda: prefill_failed(bench, kind)) < TIMES


PADDING = b" " * (1 << 20)
CHAT = b'{"model": "tiny-chat", "messages": [{"role": "user", "content": "%b"}], "max_tokens": 4%b}'
KEY = "the test's own key"
REQUESTS = {  # name -> path, body of a mebibyte, key, status
    "a wrong field": ("/v1/chat/completions", PADDING + CHAT % (b"x", b', "temperature": 9'), KEY, 400),
    "a prompt that is too long": ("/v1/chat/completions", CHAT % (b"a b " * (1 << 18), b""), KEY, 400),
    "a wrong key": ("/v1/chat/completions", PADDING + CHAT % (b"x", b""), "another", 401),
    "an unknown model": ("/v1/completions", PADDING + b'{"model": "x", "prompt": "x"}', KEY, 404),
    "too large": ("/v1/completions", PADDING * 2, KEY, 413),
    "no engine": ("/v1/chat/completions", PADDING + CHAT % (b"x", b""), KEY, 503),
    "no engine to stream": ("/v1/chat/completions", PADDING + CHAT % (b"x", b', "stream": true'), KEY, 503),
}


@pytest.fixture(scope="module")
def frontend_without_collector(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    for file in Path("recipes/tiny-chat").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tree = yaml.safe_load((folder / "recipe.yaml").read_text())
    tree["frontend"] = {"max_body_bytes": (1 << 20) + 1000}
    tree["limits"] = {"max_prompt_tokens": 1000}
    tree |= {"model": str(Path("models/tiny-chat").resolve()), "served_model_name": "tiny-chat"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    entry = {"name": "test", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": [entry]}))
    options = ("--api-keys", str(folder / "keys.yaml"), "--no-access-log", "--log-level", "error")
    with frontend_server(folder, *options, recipe=str(folder), collector=False) as server:
        yield server


@pytest.mark.parametrize("name", REQUESTS)
def test_forty_requests_of_a_mebibyte_grow_the_process_by_less_than_20_mb(frontend_without_collector, name):
    """With the collector off: what only it could free would be 40 MB."""
    server, (path, body, key, status) = frontend_without_collector, REQUESTS[name]
    headers = {"authorization": f"Bearer {key}"}

    def send(times):
        for _ in range(times):
            assert server.call("POST", path, body, headers)[0] == status

    send(10)  # what is made once is made now
    before = server.rss_bytes()
    send(40)
    assert server.rss_bytes() - before < 20e6
