"""Server-sent events of one answer on their way to a client: what is ready, and when to write it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from bireme.openai.pace import Pacer

PREFIX, SUFFIX = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
COMMENT = b": still working\n\n"


class TextTemplate(Protocol):
    """Makes the event of a piece of text (ChunkTemplate)."""

    def text(self, index: int, text: str) -> bytes: ...


class EventStream:
    """A buffer between an answer and its connection (pipelines.chat_stream.ChunkSink)."""

    __slots__ = (
        "_is_dirty", "_max_bytes", "_pacer", "_parts", "_size", "_template", "_waiter", "is_closed", "is_complete",
        "is_overrun", "written_at",
    )  # fmt: skip

    def __init__(self, template: TextTemplate, pacer: Pacer, max_bytes: int) -> None:
        self._template, self._pacer, self._max_bytes = template, pacer, max_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._is_dirty = False
        self._waiter: asyncio.Future[None] | None = None
        self.is_complete = False  # the last event is in the buffer, or out
        self.is_closed = False  # nothing comes any more
        self.is_overrun = False  # the client reads too slowly
        self.written_at = time.monotonic()

    # Called by the answer

    def text(self, index: int, text: str) -> None:
        self._put(self._template.text(index, text))

    def chunk(self, data: bytes) -> None:
        self._put(data)

    def end(self) -> None:
        self.is_complete = True
        self._put(DONE)

    def fail(self, body: bytes) -> None:
        """Tell the client of an error after the beginning."""
        self._put(PREFIX + body + SUFFIX)
        self.end()

    def _put(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._max_bytes:
            self.is_overrun = True
            self.close()
        elif not self._is_dirty:
            self._is_dirty = True
            self._pacer.mark(self)

    # Called by the connection

    async def wait(self) -> None:
        """Return when there is something to write, or nothing will come."""
        if self.is_closed:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        self.written_at = time.monotonic()
        return data

    def wake(self) -> None:
        self._is_dirty = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        self.is_closed = True
        self.wake()

    def comment(self) -> None:
        """Write a comment, so that proxies see life."""
        if not self.is_complete:
            self._put(COMMENT)
