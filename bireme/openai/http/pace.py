"""When streams write: at once while there is time, in bulk when there is none.

After a flush that took t, the next one waits t: writing takes half of the loop at most, and meanwhile steps of the
engines pile up in the streams instead of in gRPC's queues.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from bireme.coalescing import FLUSH_PAUSE


class Flushable(Protocol):
    def wake(self) -> None:
        """Write, or let the stream's task do it; called once for each mark."""


class Pacer:
    """Wakes streams that have something to write. Used on one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._dirty: list[Flushable] = []
        self._next_at = 0.0
        self._is_planned = False
        self.now = time.monotonic()  # of the last flush

    def mark(self, stream: Flushable) -> None:
        """The stream has something to write; mark it again only after it was woken."""
        self._dirty.append(stream)
        if not self._is_planned:
            self._plan()

    def _plan(self) -> None:
        self._is_planned = True
        wait_s = self._next_at - self._loop.time()
        if wait_s <= 0:
            self._loop.call_soon(self._flush)  # after the rest of the current step
        else:
            self._loop.call_later(wait_s, self._flush)

    def _flush(self) -> None:
        began = self._loop.time()
        self.now = time.monotonic()
        dirty, self._dirty = self._dirty, []
        for stream in dirty:
            stream.wake()
        self._loop.call_soon(self._flushed, began)  # the woken tasks run before this

    def _flushed(self, began: float) -> None:
        now = self._loop.time()
        self._next_at = now + FLUSH_PAUSE * (now - began)
        self._is_planned = False
        if self._dirty:
            self._plan()
