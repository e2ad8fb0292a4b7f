"""The asyncio loop of a stub, on a thread of its own; Triton's threads only post to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from bireme.errors import DeadlineExceededError

_T = TypeVar("_T")
logger = logging.getLogger("bireme.triton")


class EventLoop:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"loop-{name}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._loop.is_closed()

    def post(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop. Raises RuntimeError when the loop is closed."""
        self._loop.call_soon_threadsafe(callback)

    def every(self, period_s: float, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop every `period_s`, from now until the loop ends."""

        def again() -> None:
            self._loop.call_later(period_s, again)
            callback()

        self.post(again)

    def run(self, coroutine: Coroutine[Any, Any, _T], limit_s: float | None = None) -> _T:
        """Run `coroutine` on the loop and wait for it here. Raises DeadlineExceededError past the limit."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(limit_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # from 3.11 this is also what the coroutine itself may raise
                raise
            future.cancel()
            raise DeadlineExceededError(f"not done within {limit_s} s") from None

    def stop(self, limit_s: float) -> None:
        self._is_stopping = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(limit_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._is_stopping:
                self._run_until_interrupted()
            self._cancel_tasks()
        finally:
            self._loop.close()

    def _run_until_interrupted(self) -> None:
        try:
            self._loop.run_forever()
        except BaseException:  # SystemExit in a callback leaves run_forever(); the requests of others go on
            logger.exception("loop_interrupted")

    def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
