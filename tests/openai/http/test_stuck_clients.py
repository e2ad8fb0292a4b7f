"""Clients that keep their connection and do not read, on a server as it serves: uvicorn, uvloop and real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import socket
import time

import pytest
import uvicorn
import uvloop

from bireme.config import FrontendConfig
from bireme.openai.http import call
from bireme.openai.http.connection import Connection
from bireme.openai.http.idle_connections import IdleConnections
from bireme.openai.keys import ApiKeys, KeyEntry
from tests.openai.api_keys import bearer
from tests.openai.batch.forms import upload
from tests.openai.conftest import started_frontends

KEY = "key"
HEAD = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
LIMIT_S = 20
SMALL_BYTES = 4096  # of the kernel's buffers, so that little is on the way


class Server:
    """A frontend with one slot, for all and for its only key."""

    def __init__(self, bench, port, connections):
        self.bench, self.port, self.connections = bench, port, connections

    async def connect(self, data):
        """Return the socket of a client that sends and then does nothing."""
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", self.port))
        await loop.sock_sendall(client, data)
        return client

    async def begin_stream(self):
        """Return the socket of a client that reads nothing of its stream, and the stream's generation."""
        messages = [{"role": "user", "content": "hi"}]
        body = json.dumps({"model": "test", "messages": messages, "stream": True, "max_tokens": 10_000})
        head = f"POST /v1/chat/completions {HEAD}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client = await self.connect((head + body).encode())
        await self.bench.workers.reached("decode")
        return client, self.bench.workers.running[0]

    def is_blocked(self):
        return any(connection.flow.write_paused for connection in self.connections)

    async def check_free(self, client):
        """Check that the connection is gone, and that the only slot is free."""
        await until(lambda: not self.connections and not self.bench.app._num_active)
        with contextlib.closing(client), contextlib.suppress(ConnectionResetError):
            while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 20), LIMIT_S):
                pass
        reply = self.bench.chat(bearer(KEY))
        if not reply.task.done():
            await self.bench.workers.emit(4)
        assert (await reply.end()).status == 200


async def until(condition):
    end_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_at
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(app):
    """Serve it: (port, connections)."""
    http = functools.partial(Connection, FrontendConfig(), IdleConnections(100, 1000))
    server = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="off", log_config=None))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
    running = asyncio.ensure_future(server._serve([listener]))  # serve() takes the signals of the process
    await until(lambda: server.started)
    try:
        yield listener.getsockname()[1], server.server_state.connections
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.force_exit = server.should_exit = True
        await running


@pytest.fixture
def run(tmp_path, caplog):
    """Return a function that runs an async case with a Server."""

    async def serve(case):
        entry = KeyEntry(name="a", sha256=hashlib.sha256(KEY.encode()).hexdigest(), max_concurrent_requests=1)
        limits = {"max_concurrent_requests": 1, "max_stream_buffer_bytes": 50_000}
        async with started_frontends() as start:
            bench = await start(ApiKeys((entry,)), tmp_path, limits=limits)
            async with listening(bench.app) as (port, connections):
                await case(Server(bench, port, connections))

    def run(case):
        with caplog.at_level(logging.ERROR):
            uvloop.run(serve(case))
        assert not caplog.messages

    return run


@pytest.fixture
def short_time(monkeypatch):
    monkeypatch.setattr(call, "_READ_TIMEOUT_S", 0.2)


def test_a_stream_over_its_buffer_s_limit_is_cancelled(run):
    async def case(server):
        client, generation = await server.begin_stream()
        was_blocked = False
        while not generation.is_over:
            generation.emit()
            await asyncio.sleep(0.001)
            was_blocked |= server.is_blocked()
        assert was_blocked and generation.is_aborted
        await server.check_free(client)

    run(case)


def test_a_stream_whose_work_has_ended_waits_only_for_a_time(run, short_time):
    async def case(server):
        client, generation = await server.begin_stream()
        while not server.is_blocked():
            generation.emit()
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.5)
        assert not generation.is_aborted
        generation.end("stop")
        await server.check_free(client)

    run(case)


def test_a_file_is_sent_only_while_it_is_read(run, short_time):
    async def case(server):
        file = (await upload(server.bench, b"{}\n" * 1_000_000, headers=bearer(KEY))).json()
        client = await server.connect(f"GET /v1/files/{file['id']}/content {HEAD}\r\n".encode())
        await server.check_free(client)

    run(case)


def test_a_whole_answer_waits_only_for_a_time_behind_those_that_are_not_read(run, short_time):
    async def case(server):
        client = await server.connect(f"GET /openapi.json {HEAD}\r\n".encode() * 20)
        await server.check_free(client)

    run(case)
