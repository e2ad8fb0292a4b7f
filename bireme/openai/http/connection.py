"""uvicorn's connection with what it lacks: limits of what comes around bodies, of requests that wait behind one another
and of idle connections, and notice of a lost client for all its requests.

A head (request line and headers) that is too large is answered with 431, one that does not come in time with 408;
uvicorn would read and wait without end. Fields behind a body (trailers) are dropped: no proxy in front has looked at
them, so none may count as a header. A client with too many of them, or with too many unanswered requests, loses its
connection, and so does one whose body does not end soon after its answer. When the client leaves, each of its running
requests is told: uvicorn tells only the last one, and of two sent one after the other the first would go on generating
for nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bireme.config import FrontendConfig
from bireme.openai.http.error_replies import HttpError, reply_of
from bireme.openai.http.idle_connections import IdleConnections

_HEADER_FRAME = 4  # ": " and the end of the line
_MAX_UNANSWERED = 100  # no key: requests of one connection; clients seldom send more than one
logger = logging.getLogger("bireme.openai")


class _Dropped(list[tuple[bytes, bytes]]):
    """Takes uvicorn's list of headers' place behind the head."""

    def append(self, field: tuple[bytes, bytes]) -> None:
        pass


_DROPPED = _Dropped()


class Connection(HttpToolsProtocol):
    """One client's connection; `limits` and `idle` are what functools.partial gives to uvicorn's factory."""

    def __init__(self, limits: FrontendConfig, idle: IdleConnections, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits, self._idle = limits, idle
        self._open = deque[RequestResponseCycle]()  # requests not answered yet, the oldest first
        self._is_in_head, self._has_read_body = False, False  # the second: with the bytes that came last
        self._num_bytes = 0  # of the head, or since the body's last byte
        self._timer: asyncio.TimerHandle | None = None  # for a head, and for a body whose request has been answered
        self._refusal: HttpError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        self._idle.add(self, len(self.connections))

    def data_received(self, data: bytes) -> None:
        self._has_read_body = False
        super().data_received(data)
        if self._is_in_head:
            self._start_timer()
            self._count(len(data))
        elif (cycle := self.cycle) is not None:
            if cycle.more_body:
                self._go_on_with_body(len(data))
            elif cycle.response_complete:  # blank lines: uvicorn has stopped its timer of idle connections for them
                self._start_timer()

    def _go_on_with_body(self, num_bytes: int) -> None:
        if self._has_read_body:
            self._num_bytes = 0
            self._idle.touch(self)
        else:
            self._count(num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._limits.max_header_bytes:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_in_head, self._num_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + _HEADER_FRAME for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._refusal = self._too_large()
            raise self._refusal  # the parser stops, and has uvicorn call send_400_response
        if self._is_answering() and len(self._open) >= _MAX_UNANSWERED:
            limit = f"{_MAX_UNANSWERED} requests of this connection are not answered yet, its limit"
            self._refusal = HttpError(429, limit, code="too_many_requests")
            raise self._refusal
        super().on_headers_complete()
        self._open.append(self.cycle)
        self.headers = _DROPPED

    def on_body(self, body: bytes) -> None:
        self._has_read_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle.response_complete:
            self.cycle.more_body = False
            self._stop_timer()
        else:
            self._idle.remove(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body or not self._is_answering():
            self._idle.add(self, len(self.connections))
            if self.cycle.more_body and self.cycle.response_complete:
                self._start_timer()

    def send_400_response(self, msg: str) -> None:
        if self._refusal is None:
            super().send_400_response(msg)
        else:
            self._refuse(self._refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._idle.remove(self)
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open.clear()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._is_answering():  # the answer to an earlier request comes first
            self._start_timer()
        elif not self._is_in_head:  # nobody waits for an answer
            self.transport.close()
        else:
            limit = f"frontend.header_timeout_s = {self._limits.header_timeout_s:g} s"
            self._refuse(HttpError(408, f"the request's headers did not come within {limit}", code="timeout"))

    def _is_answering(self) -> bool:
        while self._open and self._open[0].response_complete:  # they are answered one after the other
            self._open.popleft()
        return bool(self._open)

    def _too_large(self) -> HttpError:
        limit = f"frontend.max_header_bytes is {self._limits.max_header_bytes}"
        return HttpError(431, f"the request line and headers are too large; {limit}", code="headers_too_large")

    def _refuse(self, error: HttpError) -> None:
        """Send the error, unless an answer is half sent or the request has one, and close."""
        self._stop_timer()
        self._is_in_head = False
        has_answer = self.cycle is not None and self.cycle.more_body and self.cycle.response_complete
        if has_answer or self._is_answering():
            logger.warning("connection_closed status=%d error=%s", error.status, error)
        else:
            reply = reply_of(error)
            head = (
                f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(reply.body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + reply.body)
        self.transport.close()
