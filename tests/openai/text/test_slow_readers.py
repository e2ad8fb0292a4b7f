"""Clients that stop reading and stay, or leave, over fake workers, for every kind of text."""

from __future__ import annotations

import asyncio

import pytest

from bireme.errors import UnavailableError
from bireme.openai.http import call

MESSAGES = [{"role": "user", "content": "hi"}]
KINDS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1000},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1000},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1000},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1000},
}


@pytest.fixture
async def begin(frontend):
    """Return a function: a path, limits -> a bench with one slot, a begun stream that is no longer read, its work."""
    replies = []

    async def begin(path="/v1/chat/completions", **tree):
        tree["limits"] = {"max_concurrent_requests": 1, **tree.get("limits", {})}
        bench = await frontend(**tree)
        reply = bench.call("POST", path, {"model": "test", "stream": True, **KINDS[path]})
        await bench.workers.emit()
        while not reply.messages:
            await asyncio.sleep(0.01)
        reply.stop_reading()
        replies.append(reply)
        generation = bench.workers.running[0]
        generation.emit()
        await asyncio.sleep(0.05)  # a write waits for the client
        return bench, reply, generation

    yield begin
    for reply in replies:  # one that hangs would outlast the test
        reply.go_on_reading()


async def has_room(bench):
    """Whether the slots are free: one chat is answered."""
    reply = bench.chat()
    await bench.workers.emit(4)
    return (await reply.end()).status == 200 and bench.app._num_active == 0


@pytest.mark.parametrize("path", KINDS)
async def test_over_the_buffer_s_limit_the_work_is_cancelled(begin, path):
    bench, reply, generation = await begin(path, limits={"max_stream_buffer_bytes": 5000})
    for _ in range(100):
        generation.emit()
        await asyncio.sleep(0.001)
    await reply.end()
    assert generation.is_aborted and generation.num_tokens < 100
    assert await has_room(bench)


@pytest.mark.parametrize("path", KINDS)
async def test_once_the_work_has_ended_the_client_has_a_time_to_read(begin, path, monkeypatch):
    monkeypatch.setattr(call, "_READ_TIMEOUT_S", 0.1)
    bench, reply, generation = await begin(path)
    await asyncio.sleep(0.3)
    assert not reply.task.done(), "no time runs while the work does"
    generation.end("stop")
    await reply.end()
    assert await has_room(bench)


async def test_one_that_goes_on_reading_gets_everything(begin, monkeypatch):
    monkeypatch.setattr(call, "_READ_TIMEOUT_S", 60)
    _, reply, generation = await begin()
    for _ in range(50):
        generation.emit()
    generation.end("stop")
    await asyncio.sleep(0.05)
    reply.go_on_reading()
    *events, finish, done = (await reply.end()).events()
    assert len([event for event in events if event["choices"][0]["delta"].get("content")]) == 52
    assert finish["choices"][0]["finish_reason"] == "stop" and done == "[DONE]"


async def test_an_error_waits_no_longer_for_its_reader(begin, monkeypatch):
    monkeypatch.setattr(call, "_READ_TIMEOUT_S", 0.1)
    bench, reply, _ = await begin(pipeline={"migration_limit": 0})
    bench.workers.down["decode"] = UnavailableError("gone")
    await bench.workers.lose("decode")
    await reply.end()
    bench.workers.down.clear()
    assert await has_room(bench)


async def test_a_client_that_leaves_instead_ends_its_request(begin):
    bench, reply, generation = await begin()
    reply.leave()
    await asyncio.sleep(0)
    reply.go_on_reading()  # a server's write to nobody returns
    await reply.end()
    assert generation.is_aborted and await has_room(bench)


async def test_a_drain_ends_a_stream_that_is_not_read(begin, monkeypatch):
    monkeypatch.setattr(call, "_READ_TIMEOUT_S", 0.1)
    bench, reply, generation = await begin()
    reply.task.cancel()
    await reply.end()
    assert generation.is_aborted


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", KINDS)
async def test_a_client_that_leaves_stops_the_engine(frontend, path, stream):
    bench = await frontend()
    reply = bench.call("POST", path, {"model": "test", "stream": stream, **KINDS[path]})
    await bench.workers.emit(2)
    generation = bench.workers.running[0]
    reply.leave()
    await reply.end()
    assert generation.is_aborted
