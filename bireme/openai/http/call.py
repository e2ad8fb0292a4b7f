"""One HTTP request: its headers, its body within limits, its reply, and whether its client is still there."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from bireme.errors import drop_frames
from bireme.openai.http.direct import AtOnce, DirectWrite, Watch, cycle_of, direct_write, drop, is_body_coming
from bireme.openai.http.error_replies import ErrorForm, ErrorReply, HttpError, reply_of
from bireme.openai.keys import OPEN, Tenant
from bireme.request_trace import RequestTrace

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
_T = TypeVar("_T")
Patience = Callable[[], Awaitable[None]]

NOT_MODIFIED = 304  # has no body; its length would be the one that the client has
JSON: Header = (b"content-type", b"application/json")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache, no-transform"))
JSON_ONLY = (b"application/json",)
_DISCARD_S, _DISCARD_BYTES = 5.0, 64 << 20
_NO_BODY_S = 5.0  # in which a request without a body has to end it
_READ_TIMEOUT_S = 60.0  # for a client that is behind to make room for the next part of its reply
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGoneError(Exception):
    """The client no longer reads the answer, or too slowly."""


class Call:
    """Used by one task."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._take: Callable[[bytes], object] | None = None
        self._cycle = cycle_of(receive)
        self.path: str = scope["path"]  # decoded; decisions look only at this
        self.method: str = scope["method"]
        self.headers: list[Header] = scope["headers"]
        self._first: dict[bytes, bytes] = dict(reversed(self.headers))  # of several with one name the first
        self.query: bytes = scope.get("query_string", b"")
        self.arrived_at = time.monotonic()
        given = self.header(b"x-request-id")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
        self._own_headers: list[Header] = [(b"x-request-id", self.request_id)]
        self._error_form: ErrorForm = reply_of
        self.tenant: Tenant = OPEN
        self.is_canary = False  # the launch's own request, no load
        self.is_batch = False  # a line of a batch: it gives way to everybody else
        self._has_read = False  # the whole body
        self.status = 0  # of the reply; 0: none yet
        self.notes: dict[str, object] = {}  # for the access log
        self.trace: RequestTrace | None = None  # None: nobody wants it
        self.original: Any = None  # mirror's, of a request that is to be copied

    @property
    def shown_ids(self) -> str:
        """By what a log line names it."""
        trace_id = self.notes.get("trace_id")
        return f"request_id={self.request_id.decode()}" + (f" trace_id={trace_id}" if trace_id else "")

    def speak(self, error_form: ErrorForm, request_id_header: bytes) -> None:
        """Show errors in this form, and the request's id under one more name."""
        self._error_form = error_form
        self._own_headers.append((request_id_header, self.request_id))

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add to the reply's headers; too late once it has begun."""
        self._own_headers.append((name, value))

    def error_reply(self, error: BaseException) -> ErrorReply:
        """Return what the caller is told of an error, in the form of its API."""
        return self._error_form(error, self.request_id)

    def header(self, name: bytes) -> bytes:
        """Return a header's value, b"" without; of several the first."""
        return self._first.get(name, b"")

    def is_repeated(self, name: bytes) -> bool:
        return len(self._first) < len(self.headers) and sum(key == name for key, _ in self.headers) > 1

    async def body(self, max_bytes: int, timeout_s: float, kinds: tuple[bytes, ...] = JSON_ONLY) -> bytes:
        """Return the whole body. Raises HttpError for another type than these, or when it is too large or too slow."""
        self._check_body(kinds)
        if self.body_length > max_bytes:
            raise _too_large(max_bytes)
        return await self._within(self._read(max_bytes), timeout_s)

    async def body_part(self, num_bytes: int, timeout_s: float, kinds: tuple[bytes, ...]) -> bytes:
        """Return the next so many bytes of the body, or a few more; fewer: it has ended. Raises HttpError."""
        self._check_body(kinds)
        parts, size = [], 0

        async def read() -> None:
            nonlocal size
            while size < num_bytes and not self._has_read:
                message = await self._receive()
                if message["type"] != "http.request":
                    raise ClientGoneError
                self._has_read = not message.get("more_body")
                parts.append(message.get("body", b""))
                size += len(parts[-1])

        await self._within(read(), timeout_s)
        return b"".join(parts)

    @property
    def body_length(self) -> int:
        """As the client has announced it; 0: it has not."""
        length = self.header(b"content-length")
        return int(length[:20]) if length.isdigit() else 0

    def _check_body(self, kinds: tuple[bytes, ...]) -> None:
        kind = self.header(b"content-type").split(b";")[0].strip().lower()
        if kind not in kinds:
            allowed = b" or ".join(kinds).decode()
            raise HttpError(415, f"content-type: send {allowed}", code="unsupported_media_type")
        if self.header(b"content-encoding") not in (b"", b"identity"):
            raise HttpError(415, "content-encoding: send the body uncompressed", code="unsupported_media_type")

    async def _within(self, reading: Awaitable[_T], timeout_s: float) -> _T:
        try:
            async with asyncio.timeout(timeout_s):
                return await reading
        except TimeoutError:
            raise HttpError(
                408, f"the body did not arrive in {timeout_s:g} s; send it faster", code="timeout"
            ) from None

    async def _read(self, max_bytes: int) -> bytes:
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    async def end_body(self) -> None:
        """Read the body of a request that has none, as `when_gone` needs it. Raises HttpError where it has one, or does
        not say soon that it has none.
        """
        await self._within(self._read(0), _NO_BODY_S)

    async def discard_body(self) -> None:
        """Read what the client still sends, within bounds: closing a connection with unread bytes resets it, and most
        clients then see no reply at all.
        """

        async def discard() -> None:
            left = _DISCARD_BYTES
            while left > 0 and is_body_coming(self._cycle):
                left -= len((await self._receive()).get("body", b""))

        try:
            async with asyncio.timeout(_DISCARD_S):
                await discard()
        except TimeoutError as error:
            drop_frames(error)

    async def reply(self, status: int, body: bytes, *headers: Header) -> None:
        """Send the whole reply; JSON unless a header says otherwise."""
        kinds = () if any(key == b"content-type" for key, _ in headers) else (JSON,)
        self.status = status
        lengths = () if status == NOT_MODIFIED else ((b"content-length", str(len(body)).encode()),)
        own = [*self._own_headers, *lengths]
        with AtOnce(self._cycle):
            await self._put({"type": "http.response.start", "status": status, "headers": [*own, *kinds, *headers]})
            await self._put({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def reply_parts(self, length: int, parts: AsyncIterator[bytes], *headers: Header) -> None:
        """Send a reply of so many bytes as they come, with status 200."""
        self.status = 200
        own = [*self._own_headers, (b"content-length", str(length).encode()), *headers]
        await self._put({"type": "http.response.start", "status": 200, "headers": own})
        if self.method != "HEAD":
            async for part in parts:
                await self._put({"type": "http.response.body", "body": part, "more_body": True})
        await self._put({"type": "http.response.body", "body": b""})

    async def write_events(self, data: bytes, is_last: bool, patience: Patience | None = None) -> None:
        """Send server-sent events; the first time after the headers. Raises ClientGoneError for a client that does not
        read: _READ_TIMEOUT_S after `patience` has returned, or at once with its error.
        """
        body = {"type": "http.response.body", "body": data, "more_body": not is_last}
        if self.status:
            await self._put(body, patience)
            return
        self.status = 200
        headers = [*_EVENTS, *self._own_headers]
        with AtOnce(self._cycle):
            await self._put({"type": "http.response.start", "status": 200, "headers": headers}, patience)
            await self._put(body, patience)

    async def _put(self, message: Message, patience: Patience | None = None) -> None:
        if self._cycle is not None and not self._cycle.flow.write_paused:
            await self._send(message)
            return
        sending = asyncio.ensure_future(self._send(message))
        try:
            if patience is not None:
                await _either(sending, patience())
            async with asyncio.timeout(_READ_TIMEOUT_S):
                await sending
        except TimeoutError:
            raise ClientGoneError from None
        finally:
            sending.cancel()

    def drop(self) -> None:
        drop(self._cycle)

    def tap(self, take: Callable[[bytes], object]) -> None:
        """Show what of the reply's body goes out from now on."""
        send = self._send

        async def shown(message: Message) -> None:
            await send(message)
            if body := message.get("body"):
                take(body)

        self._send, self._take = shown, take

    def direct_write(self) -> DirectWrite | None:
        """Return a faster way to write events other than the last, once some have been written."""
        write, take = direct_write(self._cycle), self._take
        if take is None or write is None:
            return write

        def shown(data: bytes) -> bool:
            is_written = write(data)
            if is_written:
                take(data)
            return is_written

        return shown

    def when_gone(self, callback: Callable[[], object]) -> Watch:
        """Call back when the client leaves; after the body was read. The caller cancels what is returned."""
        return Watch(self._cycle, self._receive, callback)

    async def unless_gone(self, work: Awaitable[_T]) -> _T:
        """Return the work's result; when the client leaves, cancel it and raise ClientGoneError."""
        task = asyncio.ensure_future(work)
        watch = self.when_gone(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            if watch.is_gone:
                raise ClientGoneError from None
            task.cancel()
            raise
        finally:
            watch.cancel()


Handler = Callable[[Call], Awaitable[None]]
Post = Callable[[Call, bytes], Awaitable[None]]  # with the request's body


async def _either(sending: asyncio.Future[None], other: Awaitable[None]) -> None:
    """Return when one of both has ended. Raises the other's error."""
    task = asyncio.ensure_future(other)
    try:
        await asyncio.wait((sending, task), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()


def _too_large(max_bytes: int) -> HttpError:
    close = ((b"connection", b"close"),)
    return HttpError(413, f"the body exceeds frontend.max_body_bytes {max_bytes}; shorten it", code="too_large",
                     headers=close)  # fmt: skip
