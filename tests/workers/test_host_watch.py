"""A host that is there, one that is busy, and one that answers nothing; and what waits for it."""

from __future__ import annotations

import asyncio
import socket
import time

import numpy as np
import pytest

from bireme.errors import BiremeError, EngineLostError
from bireme.launch import free_port
from bireme.messages import EngineRequest, SamplingParams
from bireme.workers import host_watch
from bireme.workers.client import Workers
from bireme.workers.grpc import GrpcChannel
from bireme.workers.host_watch import HostState, HostWatch
from tests.workers.test_client import PrefillServer

REQUEST = EngineRequest(prompt=np.array([1, 2], np.int32).tobytes(), sampling=SamplingParams(max_tokens=4))
ANSWERS, SILENT, LOST = HostState.ANSWERS, HostState.SILENT, HostState.LOST


class Way:
    """The way to a server. While it is cut nothing passes, and the kernel answers no handshake: its queue is full."""

    def __init__(self, target):
        self._target = target.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_whole = asyncio.Event()
        self.is_whole.set()
        self.num_handshakes = 0
        self._fillers = []
        self._tasks = [asyncio.create_task(self._accept())]

    def cut(self):
        self.is_whole.clear()
        for _ in range(3):
            self._fillers.append(socket.socket())
            self._fillers[-1].setblocking(False)
            self._fillers[-1].connect_ex(self._listener.getsockname())

    def mend(self):
        for one in self._fillers:
            one.close()
        self.is_whole.set()

    async def _accept(self):
        loop = asyncio.get_running_loop()
        while True:
            await self.is_whole.wait()
            try:
                near, _ = self._listener.accept()
            except BlockingIOError:
                await asyncio.sleep(0.005)
                continue
            self.num_handshakes += 1
            near.setblocking(False)
            far = socket.socket()
            far.setblocking(False)
            await loop.sock_connect(far, (self._target[0], int(self._target[2])))
            self._tasks += [asyncio.create_task(self._pass(*ends)) for ends in ((near, far), (far, near))]

    async def _pass(self, source, sink):
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 1 << 16):
            await self.is_whole.wait()
            await loop.sock_sendall(sink, data)
        sink.close()

    async def close(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in (self._listener, *self._fillers):
            one.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("PAUSE_S", 0.05), ("TRY_S", 0.05), ("LOST_S", 1.0)):
        monkeypatch.setattr(host_watch, name, seconds)


@pytest.fixture
async def way(bus):
    way = Way(bus.address)
    yield way
    await way.close()


@pytest.fixture
async def watch():
    """Return a function that watches an address; what it tells is in `.states`."""
    watches = []

    def start(address, is_awaited=lambda: True):
        states = []
        watches.append(HostWatch(address, is_awaited, states.append))
        watches[-1].states = states
        return watches[-1]

    yield start
    for one in watches:
        one.stop()


@pytest.fixture
async def far(way, bus):
    """Return workers that reach the server by the way, and the decode worker's name there."""
    workers = Workers(None, 60.0)
    workers.silences = []
    workers.on_silence = lambda *told: workers.silences.append(told)
    yield workers, f"decode@{way.address}"
    await workers.close()


async def test_a_host_that_answers_nothing_is_silent_then_lost_and_may_come_back(bus, way, watch):
    way.cut()
    one = watch(way.address)
    await bus.until(lambda: LOST in one.states)
    way.mend()
    await bus.until(lambda: ANSWERS in one.states)
    assert one.states == [SILENT, LOST, ANSWERS]


async def test_a_host_is_found_again_though_somebody_could_not_take_the_news(bus, way):
    states = []

    def tell(state):
        states.append(state)
        raise RuntimeError(state)

    one = HostWatch(way.address, lambda: True, tell)
    way.cut()
    await bus.until(lambda: SILENT in states)
    way.mend()
    await bus.until(lambda: states[-1] is ANSWERS)
    assert states in ([SILENT, ANSWERS], [SILENT, LOST, ANSWERS])
    one._task.cancel()


async def test_who_listens_and_is_too_busy_to_accept_answers_and_so_does_who_refuses(watch):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        watches = [watch(f"127.0.0.1:{port}") for port in (busy.getsockname()[1], free_port())]
        await asyncio.sleep(1.0)
    assert [one.states for one in watches] == [[], []]


async def test_a_loop_that_is_late_finds_the_answers_that_came_meanwhile(way, watch):
    one = watch(way.address)
    for _ in range(3):
        await asyncio.sleep(0.08)
        time.sleep(0.5)  # longer than all tries together
    assert one.states == []


async def test_nobody_is_asked_while_nobody_waits(way, watch):
    watch(way.address, is_awaited=lambda: False)
    await asyncio.sleep(0.5)
    assert way.num_handshakes == 0


async def test_a_host_that_nobody_can_name_is_not_called_silent(watch):
    one = watch("no-such-host.invalid:8001")
    await asyncio.sleep(0.5)
    assert one.states == []


async def test_a_request_without_a_token_leaves_a_silent_host_and_its_streams_go_on_when_it_answers(
    bus, way, far, recorder
):
    workers, name = far
    stream, waiting = recorder(), recorder()
    workers.decode(name, REQUEST, stream)
    consumer, number = await bus.request_at_engine()
    bus.engine.emit(consumer, {number: 7})
    await bus.until(lambda: stream.tokens == [7])
    way.cut()
    second = workers.decode(name, REQUEST, waiting)
    await waiting.end()
    assert "its host does not answer" in str(second.failure) and workers.silences == [(way.address, True)]
    way.mend()
    await bus.until(lambda: workers.silences == [(way.address, True), (way.address, False)])
    bus.engine.emit(consumer, {number: 8})
    await bus.until(lambda: stream.tokens == [7, 8])


async def test_streams_leave_a_lost_host_and_its_next_request_has_a_connection_of_its_own(bus, way, far, recorder):
    workers, name = far
    stream = recorder()
    first = workers.decode(name, REQUEST, stream)
    consumer, number = await bus.request_at_engine()
    bus.engine.emit(consumer, {number: 7})
    await bus.until(lambda: stream.tokens == [7])
    way.cut()
    await stream.end()
    assert isinstance(first.failure, EngineLostError) and "its host does not answer" in str(first.failure)
    way.mend()
    await bus.until(lambda: workers.silences[-1] == (way.address, False))
    workers.decode(name, REQUEST, recorder())
    await bus.until(lambda: len(bus.engine.requests) == 2 or (consumer, number) not in bus.engine.requests)


@pytest.fixture
async def prefill():
    """Return a server that answers one call and keeps the next ones, the way to it, and a client of its worker."""
    server = PrefillServer()
    way = Way(await server.start())
    workers = Workers(None, 60.0)
    await workers.prefill(f"prefill@{way.address}", REQUEST, "first")
    server.answers_after = 1
    yield server, way, workers
    await workers.close()
    await way.close()
    await server.server.stop(0)


async def test_a_connection_may_take_a_while(way):
    channel = GrpcChannel(way.address)
    way.is_whole.clear()
    asked = asyncio.ensure_future(channel.infer("decode", {}))
    await asyncio.sleep(0.5)  # as on a machine that stalls
    way.is_whole.set()
    with pytest.raises(BiremeError, match="UNIMPLEMENTED"):  # the server is reached, and has no such method
        await asked
    await channel.close()


async def test_a_prefill_leaves_a_silent_host(prefill):
    server, way, workers = prefill
    asked = asyncio.ensure_future(workers.prefill(f"prefill@{way.address}", REQUEST, "mine"))
    await asyncio.sleep(0.1)
    way.cut()
    with pytest.raises(EngineLostError, match="its host does not answer"):
        await asyncio.wait_for(asked, 10)


async def test_a_prefill_is_waited_for_as_long_as_its_host_answers(prefill):
    server, way, workers = prefill
    asked = asyncio.ensure_future(workers.prefill(f"prefill@{way.address}", REQUEST, "mine"))
    await asyncio.sleep(1.0)  # many looks
    assert not asked.done() and way.num_handshakes > 3
    server.num_pings = 1
    assert (await asked).output_ids == (7,)


async def test_whose_server_has_left_is_silent_for_nobody(prefill, bus):
    server, way, workers = prefill
    silences = []
    workers.on_silence = lambda *told: silences.append(told)
    asked = asyncio.ensure_future(workers.prefill(f"prefill@{way.address}", REQUEST, "mine"))
    await asyncio.sleep(0.1)
    way.cut()
    await asyncio.wait({asked}, timeout=10)
    await bus.until(lambda: not workers._channels[way.address].num_calls)
    workers.set_workers({})
    assert silences == [(way.address, True), (way.address, False)]
    assert isinstance(asked.exception(), EngineLostError)
