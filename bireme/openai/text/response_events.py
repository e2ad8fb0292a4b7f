"""The events of a response in the background that is streamed: kept while they are made, told to whoever asks.

    answer -> EventStream -> EventLog, ten times a second -> the store -> tell, for each reader, in any process

No reader is waited for. Where the answer begins anew (its process has died, or an attempt has failed after a token), so
do its events, with response.created under a number that leaves one out. That is how a reader that was following learns
of it, and its connection is ended, so that its client asks again. The last event is made of the kept response itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import msgspec

from bireme.errors import UnavailableError, drop_frames
from bireme.openai.http.call import Call, ClientGoneError
from bireme.openai.http.event_stream import COMMENT, EventStream
from bireme.openai.http.pace import Pacer
from bireme.openai.store_thread import StoreThread
from bireme.openai.text.response_answer import ResponseEvents
from bireme.openai.text.response_store import EventPage, ResponseStore

_WRITE_S = 0.1
_POLL_S = 0.25  # of a reader whose response runs in another process
_RETRY_S = 1.0
_LAST = {"completed": "response.completed", "failed": "response.failed"}  # others, cancelled too, are incomplete
logger = logging.getLogger("bireme.openai")


class EventLog:
    """Of one running response: `begin`, then `finish` or `stop`."""

    def __init__(self, name: str, store: StoreThread[ResponseStore], pacer: Pacer, max_bytes: int) -> None:
        self._name, self._store = name, store
        self.events = ResponseEvents()
        self.events.opening = ("response.in_progress",)
        self.stream = EventStream(self.events, pacer, max_bytes)
        self.news = asyncio.Event()  # set when there is more to read, and another one put in its place
        self._first = 0  # number of the event with which the answer has begun
        self._is_closed = asyncio.Event()
        self._writing = asyncio.get_running_loop().create_task(self._run())

    async def begin(self, queued: bytes) -> bool:
        """Tell that the response, as JSON, is queued; after the events that a dead process has left, if any.

        False: the store can't be asked now, so nothing can be told.
        """
        try:
            last = await self._store.read(ResponseStore.last_event, self._name)
        except UnavailableError as error:
            logger.error("response_events_lost id=%s error=%s", self._name, error)
            drop_frames(error)
            return False
        self._begin(0 if last is None else last + 2, queued)
        return True

    def begin_anew(self, queued: bytes) -> None:
        if not self.stream.is_overrun:
            self.stream.take()  # not written yet, and of no use any more
            self._begin(self.events.number + 1, queued)
            self.stream.go_on(None)

    async def finish(self) -> None:
        """Return when all events are written that can be."""
        self._is_closed.set()
        self.stream.close()
        await self._writing

    def stop(self) -> None:
        """Leave what is not written; readers look again."""
        self._writing.cancel()
        self._tell()

    def _begin(self, number: int, queued: bytes) -> None:
        self._first = self.events.number = number
        for kind in ("response.created", "response.queued"):
            self.stream.chunk(self.events.framed(kind, b'"response":%b}' % queued))

    async def _run(self) -> None:
        try:
            while not self.stream.is_closed:
                await self.stream.wait()
                await self._write()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WRITE_S):
                        await self._is_closed.wait()
                self.stream.go_on(None)
            await self._write()
        except Exception as error:  # whatever it is, the response itself goes on
            is_full = isinstance(error, ClientGoneError)  # more has come than can wait for a disk
            logger.error("response_events_lost id=%s", self._name, exc_info=None if is_full else error)
            drop_frames(error)

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    async def _write(self) -> None:
        """Raises ClientGoneError when nothing can be written for too long."""
        data = self.stream.take()
        first, last = self._first, self.events.number - 1
        while data:
            try:
                await self._store.do(ResponseStore.add_events, self._name, first, last, data)
                break
            except UnavailableError as error:
                drop_frames(error)
                if self.stream.is_closed:
                    raise ClientGoneError from None
                await asyncio.sleep(_RETRY_S)
        self._tell()


class _Status(msgspec.Struct):
    status: str


async def tell_events(
    call: Call, store: StoreThread[ResponseStore], name: str, after: int, comment_interval_s: float,
    log_of: Callable[[str], EventLog | None],
) -> None:  # fmt: skip
    """Write the events after number `after` as they are made, to the last one. Raises ClientGoneError."""
    reader = _Reader(after)
    while True:
        log = log_of(name)
        news = log.news if log is not None else asyncio.Event()
        page = await store.read(ResponseStore.events, name, call.tenant.name, reader.at)
        data, is_last = reader.take(page)
        if data or is_last:
            await call.write_events(data, is_last)
            reader.written_at = time.monotonic()
        elif not call.status or time.monotonic() - reader.written_at > comment_interval_s:
            await call.write_events(COMMENT, False)
            reader.written_at = time.monotonic()
        if is_last:
            return
        if not data:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S if log is None else comment_interval_s):
                    await news.wait()


class _Reader:
    def __init__(self, after: int) -> None:
        self.at = after  # number of the last event that it has
        self._is_following = False
        self.written_at = time.monotonic()

    def take(self, page: EventPage | None) -> tuple[bytes, bool]:
        """Return the next events, and whether the last one is among them. Raises ClientGoneError as `_events`."""
        if page is None:
            return b"", True
        data = b"".join(self._events(page))
        is_last = page.response is not None and (page.last is None or self.at >= page.last)
        return (data + self._end(page), True) if is_last else (data, False)

    def _events(self, page: EventPage) -> Iterator[bytes]:
        for last, data in page.chunks:
            first = last + 1 - data.count(b"\n\n")
            if first > self.at + 1 and self._is_following:
                raise ClientGoneError
            self._is_following = True
            yield data if first > self.at else _without_first(data, self.at + 1 - first)
            self.at = last

    def _end(self, page: EventPage) -> bytes:
        number = self.at + 1 if page.last is None else page.last + 1
        if self.at >= number or page.response is None:
            return b""
        status = msgspec.json.decode(page.response, type=_Status).status
        return ResponseEvents(number).framed(
            _LAST.get(status, "response.incomplete"), b'"response":%b}' % page.response
        )


def _without_first(data: bytes, count: int) -> bytes:
    return data.split(b"\n\n", count)[count]
