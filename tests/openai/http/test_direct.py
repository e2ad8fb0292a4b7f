"""The short ways through uvicorn: used with the uvicorn that is installed, and only while they are safe."""

import asyncio

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from bireme.config import FrontendConfig
from bireme.openai.http.connection import Connection
from bireme.openai.http.direct import AtOnce, Watch, cycle_of, direct_write
from bireme.openai.http.idle_connections import IdleConnections

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


class Transport:
    def __init__(self):
        self.data = b""
        self.num_writes = 0
        self.is_closed = False

    def write(self, data):
        self.data += data
        self.num_writes += 1

    def close(self):
        self.is_closed = True

    def is_closing(self):
        return False

    def get_extra_info(self, name):
        return None

    def pause_reading(self):
        pass

    resume_reading = pause_reading


@pytest.fixture
async def connection():
    """A connection to an application that keeps each request's ASGI methods and never answers."""
    calls = []

    async def app(scope, receive, send):
        calls.append((receive, send))
        await asyncio.sleep(60)

    config = Config(app, log_config=None, lifespan="off")
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    connection = Connection(
        FrontendConfig(), IdleConnections(10, 100), config=config, server_state=state, app_state={}, _loop=loop
    )
    connection.connection_made(Transport())
    connection.calls = calls
    yield connection
    for task in state.tasks:
        task.cancel()


async def begin(connection):
    """Begin a streamed reply; return its cycle."""
    connection.data_received(REQUEST + b"{}")
    await asyncio.sleep(0)
    receive, send = connection.calls[-1]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    return cycle_of(receive)


async def test_chunks_are_written_without_asgi(connection):
    cycle = await begin(connection)
    connection.transport.data = b""
    assert direct_write(cycle)(b"data: 1\n\n")
    assert connection.transport.data == b"9\r\ndata: 1\n\n\r\n"


async def test_a_reply_s_head_and_beginning_are_one_write(connection):
    connection.data_received(REQUEST.replace(b"Host: x", b"Host: x\r\nConnection: close") + b"{}")
    await asyncio.sleep(0)
    receive, send = connection.calls[0]
    with AtOnce(cycle_of(receive)):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        assert connection.transport.num_writes == 0 and not connection.transport.is_closed
    assert connection.transport.num_writes == 1 and connection.transport.data.endswith(b"\r\n\r\nok")
    assert connection.transport.is_closed


async def test_nothing_is_written_to_a_client_that_does_not_keep_up(connection):
    write = direct_write(await begin(connection))
    connection.transport.data = b""
    connection.pause_writing()
    assert not write(b"x") and not connection.transport.data
    connection.resume_writing()
    assert write(b"x")


async def test_before_the_reply_begins_there_is_no_short_way(connection):
    connection.data_received(REQUEST + b"{}")
    await asyncio.sleep(0)
    assert direct_write(cycle_of(connection.calls[0][0])) is None
    assert cycle_of(lambda: None) is None


async def test_all_requests_of_a_connection_learn_that_the_client_left(connection):
    first = await begin(connection)
    connection.data_received(REQUEST + b"{}")  # waits behind the first
    gone = []
    watch = Watch(first, connection.calls[0][0], lambda: gone.append(1))
    connection.connection_lost(None)
    assert gone == [1] and watch.is_gone


async def test_a_watch_that_was_cancelled_says_nothing(connection):
    cycle = await begin(connection)
    watch = Watch(cycle, connection.calls[0][0], lambda: pytest.fail("called"))
    watch.cancel()
    connection.connection_lost(None)
    assert not watch.is_gone
