"""What a connection refuses before there is a request: heads that are too large, those that never end, and too many."""

from __future__ import annotations

import asyncio
import functools
import json

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl

from bireme.config import FrontendConfig
from bireme.openai.http.connection import Connection

LIMITS = FrontendConfig(max_header_bytes=1000, header_timeout_s=0.3, keep_alive_s=5)
BEGIN = b"GET / HTTP/1.1\r\nHost: x\r\n"
SLOW = BEGIN + b"X-Slow: yes\r\n\r\n"


async def app(scope, receive, send):
    """Answers at once, or to `X-Slow` in two parts with a pause of twice the head's time."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"ye", "more_body": True})
    if (b"x-slow", b"yes") in scope["headers"]:
        await asyncio.sleep(2 * LIMITS.header_timeout_s)
    await send({"type": "http.response.body", "body": b"s\n"})


@pytest.fixture
async def port():
    config = uvicorn.Config(
        app, http=functools.partial(Connection, LIMITS), lifespan="off", log_config=None, port=0,
        timeout_keep_alive=LIMITS.keep_alive_s,
    )  # fmt: skip
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve())  # serve() takes the signals of the process
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await running


@pytest.fixture
async def talk(port):
    """Return a function that sends, and returns all that comes until the server closes."""

    async def talk(*parts, pause_s=0.0):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer

    return talk


def refusal(answer):
    head, body = answer.split(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert b"connection: close" in head and f"content-length: {len(body)}".encode() in head
    return int(head.split()[1]), f"{error['code']}: {error['message']}"


async def test_a_head_within_the_limits_is_served(talk):
    answer = await talk(BEGIN + b"X-A: " + b"a" * 900 + b"\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"yes\n")


@pytest.mark.parametrize(
    "head",
    [
        BEGIN + b"X-A: " + b"a" * 1000 + b"\r\n\r\n",
        BEGIN + b"X-A: " + b"a" * 1000,
        BEGIN + b"".join(b"X-%d: y\r\n" % number for number in range(120)) + b"\r\n",
        b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["one header", "one that does not end", "many", "the path"],
)
async def test_a_head_over_the_limit_is_431(talk, head):
    status, told = refusal(await talk(head))
    assert status == 431 and told.startswith("headers_too_large: ") and "max_header_bytes is 1000" in told


async def test_a_head_that_comes_byte_by_byte_without_end_is_431(talk):
    status, _ = refusal(await talk(BEGIN, *[b"X-A: " + b"a" * 240 + b"\r\n"] * 5, pause_s=0.01))
    assert status == 431


async def test_a_head_that_does_not_come_in_time_is_408(talk):
    status, told = refusal(await talk(BEGIN))
    assert status == 408 and told.startswith("timeout: ") and "header_timeout_s = 0.3 s" in told


async def test_a_connection_that_says_nothing_is_closed(talk):
    assert await talk() == b""


async def test_an_answer_may_take_longer_than_a_head(talk):
    answer = await talk(SLOW.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert answer.endswith(b"yes\n")


async def test_the_next_head_of_a_connection_has_its_time_too(talk):
    answer = await talk(BEGIN + b"\r\n", BEGIN, pause_s=0.1)
    assert answer.startswith(b"HTTP/1.1 200") and b"yes\nHTTP/1.1 408 " in answer


async def test_an_answer_under_way_ends_before_the_next_head_is_refused(talk):
    answer = await talk(SLOW, BEGIN)
    assert answer.startswith(b"HTTP/1.1 200") and b"yes\nHTTP/1.1 408 " in answer


async def test_no_refusal_is_written_into_an_answer_under_way(talk):
    answer = await talk(SLOW, BEGIN + b"X-A: " + b"a" * 1000, pause_s=0.1)
    assert answer.startswith(b"HTTP/1.1 200") and b" 431 " not in answer


async def test_requests_behind_one_another_are_answered_in_their_order(talk):
    last = BEGIN + b"Connection: close\r\n\r\n"
    answer = await talk((BEGIN + b"\r\n") * 99 + last)
    assert answer.count(b"HTTP/1.1 200") == 100 and answer.count(b"yes\n") == 100


async def test_a_connection_with_too_many_unanswered_requests_is_closed(talk, monkeypatch, caplog):
    made = []
    begin = httptools_impl.RequestResponseCycle.__init__
    monkeypatch.setattr(
        httptools_impl.RequestResponseCycle, "__init__", lambda own, **values: made.append(own) or begin(own, **values)
    )
    await talk(SLOW + b"GET / HTTP/1.1\r\n\r\n" * 2000)
    assert len(made) == 100
    assert "connection_closed status=429 error=100 requests of this connection" in caplog.text


async def test_requests_that_were_answered_do_not_count(talk):
    bursts = [(BEGIN + b"\r\n") * 60] * 4
    answer = await talk(*bursts, BEGIN + b"Connection: close\r\n\r\n", pause_s=0.2)
    assert answer.count(b"HTTP/1.1 200") == 241


async def test_what_is_no_http_is_still_400(talk):
    assert (await talk(b"\x00\xff\r\n\r\n")).startswith(b"HTTP/1.1 400")
