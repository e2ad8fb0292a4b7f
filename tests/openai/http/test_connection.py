"""What a connection refuses beside requests: heads that are too large or never end, what stands behind bodies, requests
and connections that are too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl

from bireme.config import FrontendConfig
from bireme.openai.http.connection import Connection
from bireme.openai.http.idle_connections import IdleConnections

LIMITS = FrontendConfig(max_header_bytes=1000, header_timeout_s=0.3, keep_alive_s=5)
PATIENT = FrontendConfig(max_header_bytes=1000, header_timeout_s=300, keep_alive_s=300)  # where no time may close one
MOST_IDLE = 20
BEGIN = b"GET / HTTP/1.1\r\nHost: x\r\n"
SLOW = BEGIN + b"X-Slow: yes\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
READ = CHUNKED.replace(b"Host: x", b"Host: x\r\nX-Read: yes")


HEADERS: list[tuple[bytes, bytes]] = []  # of the request that was answered last


async def app(scope, receive, send):
    """Answers at once, to `X-Read` after the body, to `X-Slow` in two parts with a pause of twice the head's time."""
    while (b"x-read", b"yes") in scope["headers"] and (await receive()).get("more_body"):
        pass
    HEADERS[:] = scope["headers"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"ye", "more_body": True})
    if (b"x-slow", b"yes") in scope["headers"]:
        await asyncio.sleep(2 * LIMITS.header_timeout_s)
    await send({"type": "http.response.body", "body": b"s\n"})


@pytest.fixture
def limits():
    return LIMITS


@pytest.fixture
async def port(limits):
    config = uvicorn.Config(
        app, http=functools.partial(Connection, limits, IdleConnections(MOST_IDLE, 10_000)), lifespan="off",
        log_config=None, port=0, timeout_keep_alive=limits.keep_alive_s,
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
        reading = asyncio.ensure_future(_until_closed(reader))
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        answer = await asyncio.wait_for(reading, 60)
        writer.close()
        return answer

    return talk


async def _until_closed(reader):
    """Return all that comes: a server that closes with something unread resets the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(1 << 16):
            parts.append(part)
    return b"".join(parts)


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


@pytest.mark.parametrize("limits", [PATIENT], ids=["patient"])
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


async def test_requests_that_were_answered_do_not_count(opened):
    ((reader, writer),) = await opened(1)
    async with asyncio.timeout(60):
        for _ in range(4):
            writer.write((BEGIN + b"\r\n") * 60)
            for _ in range(60):
                assert (await reader.readuntil(b"yes\n")).startswith(b"HTTP/1.1 200")


async def test_what_is_no_http_is_still_400(talk):
    assert (await talk(b"\x00\xff\r\n\r\n")).startswith(b"HTTP/1.1 400")


async def test_a_field_behind_the_body_is_no_header(talk):
    await talk(READ + b"1\r\nx\r\n0\r\nX-Late: yes\r\n\r\n", BEGIN + b"Connection: close\r\n\r\n")
    await talk(READ.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"0\r\nX-Late: yes\r\n\r\n")
    assert [name for name, _ in HEADERS] == [b"host", b"x-read", b"transfer-encoding", b"connection"]


@pytest.mark.parametrize("limits", [PATIENT], ids=["patient"])
@pytest.mark.parametrize("field", [b"a:b\r\n" * 20, b"a" * 100], ids=["fields", "one that does not end"])
@pytest.mark.parametrize("head", [READ, CHUNKED], ids=["before the answer", "after it"])
async def test_what_stands_behind_a_body_has_the_limit_of_a_head(talk, head, field, caplog):
    answer = await talk(head + b"1\r\nx\r\n", b"0\r\n", *[field] * 11, pause_s=0.01)
    assert b" 431 " not in answer and answer.count(b"HTTP/1.1") == (head is CHUNKED)
    assert "connection_closed status=431" in caplog.text


async def test_a_body_in_many_small_pieces_is_read_to_its_end(talk):
    pieces = [b"1\r", b"\n", b"x", b"\r\n"] * 300
    answer = await talk(READ.replace(b"chunked", b"chunked\r\nConnection: close"), *pieces, b"0\r\n\r\n", pause_s=0.001)
    assert len(b"".join(pieces)) - 300 > LIMITS.max_header_bytes and answer.endswith(b"yes\n")


async def test_blank_lines_do_not_keep_a_connection_open(talk):
    answer = await asyncio.wait_for(talk(BEGIN + b"\r\n", b"\r\n", b"\r\n", pause_s=0.1), LIMITS.keep_alive_s - 1)
    assert answer.endswith(b"yes\n")


@pytest.fixture
async def opened(port):
    """Return a function that opens so many connections, sends something on each, and has it arrive."""
    writers = []

    async def opened(count, data=b""):
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
        for _, writer in streams:
            writers.append(writer)
            writer.write(data)
        await asyncio.sleep(0.05)
        return streams

    yield opened
    for writer in writers:
        writer.close()


async def is_closed(reader, within_s=0.05):
    try:
        return await asyncio.wait_for(reader.read(), within_s) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("limits", [PATIENT], ids=["patient"])
@pytest.mark.parametrize("data", [b"", BEGIN, READ], ids=["silent", "a part of a head", "no body"])
async def test_the_connection_that_has_been_silent_for_the_longest_goes_for_a_new_one(opened, talk, data):
    streams = await opened(MOST_IDLE, data)
    assert not await is_closed(streams[0][0])
    assert (await talk(BEGIN + b"Connection: close\r\n\r\n")).endswith(b"yes\n")
    assert await is_closed(streams[0][0], 60)
    assert [await is_closed(reader) for reader, _ in streams[1:3]] == [False, False]


async def test_a_body_that_does_not_end_after_its_answer_has_the_time_of_a_head(opened):
    ((reader, writer),) = await opened(1, CHUNKED)
    await reader.readuntil(b"yes\n")
    began = asyncio.get_running_loop().time()
    while not await is_closed(reader):
        writer.write(b"1\r\nx\r\n")
    assert LIMITS.header_timeout_s / 2 < asyncio.get_running_loop().time() - began < LIMITS.keep_alive_s


async def test_idle_connections_do_not_close_those_with_a_request(opened):
    ((slow, _),) = await opened(1, SLOW)
    await opened(2 * MOST_IDLE)
    assert b"yes\n" in await asyncio.wait_for(slow.readuntil(b"s\n"), 10)


async def test_idle_connections_do_not_close_one_whose_body_is_coming(opened):
    ((reader, writer),) = await opened(1, READ)
    for _ in range(4):
        await opened(MOST_IDLE // 2)
        writer.write(b"1\r\nx\r\n")
        await asyncio.sleep(0.05)
    writer.write(b"0\r\n\r\n")
    assert b"yes\n" in await asyncio.wait_for(reader.readuntil(b"s\n"), 10)


@pytest.mark.parametrize("limits", [PATIENT], ids=["patient"])
async def test_a_connection_that_was_answered_is_idle_again(opened):
    ((first, _),) = await opened(1, BEGIN + b"\r\n")
    await first.readuntil(b"yes\n")
    await opened(MOST_IDLE)
    assert await is_closed(first, 60)
