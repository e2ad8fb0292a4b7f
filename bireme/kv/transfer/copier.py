"""The thread on which a transfer copies and calls the engine back.

All callbacks of an engine (read, write, done, release) run here, one at a time, so an engine need not guard them
against each other. Tasks are generators that take turns at each `yield`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

logger = logging.getLogger("bireme.kv.transfer")
Task = Iterator[None]


class Copier:
    def __init__(self, name: str) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queue a copy; it runs to its next `yield` in each turn."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def call(self, callback: Callable[[], None]) -> None:
        """Queue a callback, ahead of the copies. After `close` it runs on the caller's thread."""
        with self._changed:
            if not self._has_ended:
                self._calls.append(callback)
                self._changed.notify()
                return
        _guard(callback)

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread. Returns False when a callback hangs."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if callable(job):
                _guard(job)
            elif _advance(job):
                self.submit(job)

    def _next(self) -> Callable[[], None] | Task | None:
        with self._changed:
            while not self._calls and not self._tasks and not self._is_closing:
                self._changed.wait()
            if self._calls:
                return self._calls.popleft()
            if self._tasks:
                return self._tasks.popleft()
            self._has_ended = True
            return None


def _advance(task: Task) -> bool:
    """Run a task to its next yield. Returns False when it has ended."""
    try:
        next(task)
    except StopIteration:
        return False
    except Exception:
        logger.exception("transfer event=copy_failed")
        return False
    return True


def _guard(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        # A failing callback must not end the thread that all transfers need.
        logger.exception("transfer event=callback_failed")
