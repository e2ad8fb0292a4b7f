"""The loop's thread: results, limits, cancellation at the end."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from bireme.errors import DeadlineExceededError
from bireme.triton.event_loop import EventLoop


@pytest.fixture
def loop():
    loop = EventLoop("test")
    yield loop
    loop.stop(5)


async def answer(value):
    await asyncio.sleep(0)
    return value


def test_a_coroutine_s_result_comes_back(loop):
    assert loop.run(answer(3), 5) == 3


def test_a_coroutine_s_error_comes_back(loop):
    async def fail():
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        loop.run(fail(), 5)


def test_a_coroutine_past_its_limit_is_cancelled(loop):
    ended = threading.Event()

    async def forever():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(DeadlineExceededError):
        loop.run(forever(), 0.05)
    assert ended.wait(5)


def test_a_coroutine_may_raise_a_timeout_of_its_own(loop):
    async def slow():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        loop.run(slow(), 5)


def test_stop_cancels_what_runs_and_refuses_more():
    loop, ended = EventLoop("test"), threading.Event()

    async def forever():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    begun = threading.Event()

    async def begin():
        loop.task = asyncio.ensure_future(forever())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        begun.set()

    loop.run(begin(), 5)
    loop.stop(5)
    assert ended.is_set()
    assert not loop.is_running
    with pytest.raises(RuntimeError):
        loop.post(lambda: None)


def test_a_callback_that_exits_does_not_take_the_loop_along(loop):
    loop.post(sys.exit)
    assert loop.run(answer(3), 5) == 3
