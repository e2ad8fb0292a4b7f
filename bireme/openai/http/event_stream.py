"""Server-sent events of one answer on their way to a client: what is ready, and when to write it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterable
from typing import Protocol

from bireme.openai.http.call import ClientGoneError
from bireme.openai.http.direct import DirectWrite
from bireme.openai.http.pace import Pacer
from bireme.pipelines.chat_answer import encode_json
from bireme.text.output import TokenDelta

PREFIX, SUFFIX = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
COMMENT = b": still working\n\n"
_json_of = functools.lru_cache(1 << 16)(encode_json)  # pieces of text are tokens, so the same ones recur


class TextTemplate(Protocol):
    """Makes the events of text (ChunkTemplate)."""

    def text(self, index: int, text: str) -> bytes: ...

    def texts(self, index: int, jsons: Iterable[bytes]) -> bytes:
        """Return one event a piece of text, which comes as JSON; at least one."""


class EventStream:
    """A buffer between an answer and its connection (pipelines.chat_stream.ChunkSink)."""

    __slots__ = (
        "_comment", "_deltas", "_direct", "_is_dirty", "_is_sending", "_max_bytes", "_pacer", "_parts", "_size",
        "_template", "_waiter", "is_closed", "is_complete", "is_overrun", "written_at",
    )  # fmt: skip

    def __init__(self, template: TextTemplate, pacer: Pacer, max_bytes: int, comment: bytes = COMMENT) -> None:
        """`comment`: what keeps a silent stream open."""
        self._template, self._pacer, self._max_bytes, self._comment = template, pacer, max_bytes, comment
        self._parts: list[bytes] = []
        self._size = 0
        self._deltas: list[tuple[int, TokenDelta]] = []  # with text that is not among the parts yet
        self._is_dirty = False
        self._direct: DirectWrite | None = None
        self._is_sending = False  # the task is writing: nothing may overtake what it has taken
        self._waiter: asyncio.Future[None] | None = None
        self.is_complete = False  # the last event is in the buffer, or out
        self.is_closed = False  # nothing more comes
        self.is_overrun = False  # the client reads too slowly
        self.written_at = time.monotonic()

    def text(self, index: int, text: str) -> None:
        self._put(self._template.text(index, text))

    def delta(self, index: int, delta: TokenDelta) -> None:
        self._deltas.append((index, delta))
        self._mark()

    def chunk(self, data: bytes) -> None:
        self._put(data)

    def end(self, last: bytes = DONE) -> None:
        self.is_complete = True
        self._put(last)

    def _put(self, data: bytes) -> None:
        self.collect()
        self._add(data)
        self._mark()

    def collect(self) -> None:
        """Make the events of all text so far: for a template whose next event depends on them."""
        if not self._deltas:
            return
        deltas, self._deltas = self._deltas, []
        for index, delta in deltas:
            if pieces := delta.pieces():
                self._add(self._template.texts(index, map(_json_of, pieces)))

    def _add(self, data: bytes) -> None:
        if not data or self.is_overrun:
            return
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._max_bytes:
            self.is_overrun = True
            self.close()

    def _mark(self) -> None:
        if not self._is_dirty:
            self._is_dirty = True
            self._pacer.mark(self)

    async def wait(self) -> None:
        """Return when there is something to write, or nothing will come; until `go_on`, only in the second case.

        Raises ClientGoneError when the client reads too slowly, as `take` does.
        """
        if not self.is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._check()

    def take(self) -> bytes:
        """Return what is to be written now; call `go_on` when it was."""
        self._is_sending = True
        self.collect()
        self._check()
        data = self._joined()
        self._clear()
        return data

    def go_on(self, direct: DirectWrite | None) -> None:
        self._direct, self._is_sending = direct, False
        if self._parts:  # came meanwhile
            self._mark()

    def _check(self) -> None:
        if self.is_overrun:
            raise ClientGoneError

    def _joined(self) -> bytes:
        return b"".join(self._parts)

    def _clear(self) -> None:
        self._parts.clear()
        self._size = 0
        self.written_at = self._pacer.now

    def wake(self) -> None:
        self._is_dirty = False
        self.collect()
        if not self.is_closed:
            if self._is_sending or not self._parts:
                return
            if self._direct is not None and not self.is_complete and self._direct(self._joined()):
                self._clear()
                return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        self.is_closed = True
        self.wake()

    def comment(self) -> None:
        """Write a comment, so that proxies keep the stream open."""
        if not self.is_complete:
            self._put(self._comment)
