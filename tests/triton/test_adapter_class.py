"""The adapter's own decisions that no client sees: readiness, bursts, and what as_triton_model returns."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from types import SimpleNamespace

import pytest

from bireme.specs import CHAT
from bireme.stages.absent import AbsentStage
from bireme.triton import as_triton_model
from bireme.triton.event_loop import EventLoop
from bireme.triton.streams import Stream
from tests.triton.recording import Recorder


class Moody(AbsentStage):
    spec = CHAT
    mood = True

    def __init__(self):
        super().__init__("not in this test")

    def is_ready(self):
        return self.mood


class Counting(AbsentStage):
    """Remembers which requests it was given."""

    spec = CHAT

    def __init__(self):
        super().__init__("not in this test")
        self.begun = []

    async def handle(self, inputs, send, cancelled):
        self.begun.append(inputs)


@pytest.fixture
def adapter(triton_module):
    adapter = as_triton_model(Moody)()
    adapter._loop, adapter._stage, adapter._bls = EventLoop("test"), Moody(), SimpleNamespace(is_exhausted=False)
    yield adapter
    adapter._loop.stop(5)


def test_the_model_is_ready_when_its_stage_is(adapter):
    assert adapter.is_ready()
    adapter._stage.mood = False
    assert not adapter.is_ready()


def test_the_model_is_not_ready_without_its_loop(adapter):
    adapter._loop.stop(5)
    assert not adapter.is_ready()


def test_the_model_is_not_ready_when_no_thread_is_left_for_calls_to_others(adapter):
    adapter._bls.is_exhausted = True
    assert not adapter.is_ready()


def test_finalize_before_initialize_is_harmless(triton_module):
    model = as_triton_model(Moody)()
    model.finalize()
    assert not model._is_stopping  # initialize may still come


class Arrivals:
    """The adapter's way from execute() to the stage, on the test's own loop; timers wait for the test."""

    def __init__(self, monkeypatch):
        self.adapter = adapter = as_triton_model(Counting)()
        self.stage = adapter._stage = Counting()
        adapter._arrivals, adapter._tasks, adapter._is_woken = deque(), {}, False
        adapter._wake_lock = threading.Lock()
        loop = asyncio.get_running_loop()
        adapter._loop = SimpleNamespace(post=loop.call_soon_threadsafe)
        self.timers, self.bursts_s = [], []
        adapter._senders = SimpleNamespace(burst=self.bursts_s.append)
        monkeypatch.setattr(loop, "call_later", lambda delay_s, call: self.timers.append((delay_s, call)))

    async def come(self, *names):
        for name in names:
            stream = Stream(Recorder(), Stream.flush, is_decoupled=True, max_buffer_bytes=1 << 20)
            self.adapter._arrivals.append((name, stream))
        self.adapter._wake()
        await self.settle()

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def arrivals(triton_module, monkeypatch):
    return Arrivals(monkeypatch)


async def test_a_request_that_comes_alone_starts_at_once(arrivals):
    await arrivals.come("a")
    await arrivals.come("b")
    assert arrivals.stage.begun == ["a", "b"]
    assert arrivals.timers == [] and arrivals.bursts_s == []


async def test_a_burst_is_started_in_portions(arrivals):
    from bireme.coalescing import BURST, BURST_PAUSE_S

    first = [f"first-{at}" for at in range(BURST)]
    await arrivals.come(*first)
    assert arrivals.stage.begun == first
    await arrivals.come("a")
    await arrivals.come("b")
    assert arrivals.stage.begun == first  # they pile up until the pause is over
    ((delay_s, begin),) = arrivals.timers
    assert delay_s == BURST_PAUSE_S and arrivals.bursts_s == [2 * BURST_PAUSE_S]  # senders leave it the interpreter
    begin()
    await arrivals.settle()
    assert arrivals.stage.begun == [*first, "a", "b"]


async def test_after_a_burst_requests_start_at_once_again(arrivals):
    await arrivals.come("a", "b")
    ((_, begin),) = arrivals.timers
    begin()  # nothing came during the pause
    await arrivals.come("c")
    assert arrivals.stage.begun == ["a", "b", "c"]
    assert len(arrivals.timers) == 1
