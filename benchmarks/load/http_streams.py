"""HTTP load on Triton's generate_stream: one keep-alive connection a slot, server-sent events checked as they come.

Triton's generate_stream may lose tokens when responses come in bursts (a defect of that endpoint): this client
is what shows it.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import msgspec

from benchmarks.load.meter import LoadError, Trace, WrongAnswerError
from benchmarks.load.workload import TEMPERATURE, Prompt

_HEAD_END = b"\r\n\r\n"


class Event(msgspec.Struct):
    """One `data:` line, or the body of an error answer. Triton writes tensors of one element as scalars."""

    output_ids: int | list[int] = []
    text_output: str | list[str] = ""
    finish_reason: str | list[str] = ""
    error: str = ""


_decode_event = msgspec.json.Decoder(Event).decode


class UnansweredError(LoadError):
    """The connection ended before the first byte of an answer.

    On a connection that has served before this is how a server ends an idle one: like every pool of connections
    that clients have, the load then asks once more on a new one.
    """


class HttpStreams:
    def __init__(self, target: str, model: str = "generate") -> None:
        self.host, _, port = target.rpartition(":")
        self.port, self.model = int(port), model
        self._connections: dict[int, Connection] = {}

    async def open(self) -> None: ...

    async def request(self, slot: int, trace: Trace) -> None:
        connection = self._connections.get(slot)
        is_reused = connection is not None and not connection.is_closed
        try:
            if connection is None or connection.is_closed:
                connection = await self._connect(slot)
            await connection.request(self._message(trace.prompt), trace)
        except OSError as error:
            raise LoadError(f"connection: {type(error).__name__}: {error}") from error
        except UnansweredError:
            self.drop(slot)
            if not is_reused or trace.is_dropped or trace.is_stalled:
                raise
            await self.request(slot, trace)
        except LoadError:
            self.drop(slot)
            raise

    def drop(self, slot: int) -> None:
        connection = self._connections.pop(slot, None)
        if connection is not None:
            connection.abandon()

    async def close(self) -> None:
        for slot in list(self._connections):
            self.drop(slot)

    def _protocol(self) -> type[Connection]:
        return Connection

    def _message(self, prompt: Prompt) -> bytes:
        return make_request(self.model, self.host, prompt)

    async def _connect(self, slot: int) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(self._protocol(), self.host, self.port)
        self._connections[slot] = connection
        return connection


def make_request(model: str, host: str, prompt: Prompt) -> bytes:
    return post(f"/v2/models/{model}/generate_stream", host, tensors_of(prompt) | {"stream": True})


def tensors_of(prompt: Prompt) -> dict[str, Any]:
    """Return the inputs that a prompt has on every text model."""
    tensors = {"input_ids": prompt.ids, "max_tokens": len(prompt.expected), "ignore_eos": True}
    return tensors if prompt.seed is None else tensors | {"temperature": TEMPERATURE, "seed": prompt.seed}


def post(path: str, host: str, body: Any) -> bytes:
    data = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection: one request at a time, its events pushed to the trace from data_received."""

    def __init__(self) -> None:
        self.is_closed = False
        self._transport: Any = None
        self._trace: Trace | None = None
        self._done: asyncio.Future[None] | None = None
        self._body: ChunkedBody | SizedBody | None = None
        self._head = b""
        self._status = 0
        self._events = b""
        self._has_finished = False

    def connection_made(self, transport: Any) -> None:  # uvloop's is not an asyncio.Transport
        self._transport = transport

    async def request(self, message: bytes, trace: Trace) -> None:
        """Send and take everything that comes back. Raises LoadError."""
        assert self._transport is not None and self._done is None
        self._trace, self._done = trace, asyncio.get_running_loop().create_future()
        self._body, self._head, self._events, self._has_finished = None, b"", b"", False
        self._transport.write(message)
        try:
            await self._done
        finally:
            self._trace = self._done = None

    def abandon(self) -> None:
        """Close without reading on, as a client that is gone."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()
        self._end(LoadError("closed by this client"))

    def data_received(self, data: bytes) -> None:
        try:
            self._receive(data)
        except (LoadError, ValueError, msgspec.MsgspecError) as error:
            self._end(error if isinstance(error, LoadError) else LoadError(f"malformed answer: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        kind = LoadError if self._body or self._head else UnansweredError
        self._end(kind(f"the server closed the connection{f': {exc}' if exc else ''}"))

    def _receive(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            raise LoadError("data came after the end of an answer")
        if self._body is None:
            self._head += data
            head, end, data = self._head.partition(_HEAD_END)
            if not end:
                return
            self._status, self._body = parse_head(head)
        payload = self._body.feed(data)
        if self._status != 200:
            self._events += payload
            if self._body.is_complete:
                raise LoadError(f"HTTP {self._status}: {error_text(self._events)}")
            return
        self._take_events(payload)
        if self._body.is_complete:
            self._end(None if self._has_finished else LoadError("the answer ended before the request"))

    def _take_events(self, payload: bytes) -> None:
        if self._events:
            payload = self._events + payload
        *lines, self._events = payload.split(b"\n\n")
        for line in lines:
            if line.startswith(b":"):  # a comment keeps a silent stream open
                continue
            if not line.startswith(b"data: "):
                raise LoadError(f"not an event: {line[:40]!r}")
            self._take_event(line[6:])

    def _take_event(self, data: bytes) -> None:
        """Take the JSON of one event. Raises LoadError."""
        assert self._trace is not None
        event = _decode_event(data)
        if event.error:
            raise LoadError(event.error)
        if self._has_finished:
            raise WrongAnswerError("an event came after the last")
        ids = event.output_ids if isinstance(event.output_ids, list) else [event.output_ids]
        self._trace.push(array("i", ids), first(event.text_output).encode())
        if reason := first(event.finish_reason):
            self._trace.finish(reason)
            self._has_finished = True

    def _end(self, error: LoadError | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


class ChunkedBody:
    """Decoder of Transfer-Encoding: chunked, fed with whatever a read returned."""

    def __init__(self) -> None:
        self.is_complete = False
        self._left = b""

    def feed(self, data: bytes) -> bytes:
        """Return the payload that is now complete. Raises ValueError on a malformed size."""
        data = self._left + data if self._left else data
        parts, at = [], 0
        while not self.is_complete:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end].split(b";")[0], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            parts.append(data[line_end + 2 : end])
            self.is_complete = size == 0
            at = end + 2
        self._left = data[at:]
        return b"".join(parts)


class SizedBody:
    """Decoder of Content-Length."""

    def __init__(self, size: int) -> None:
        self._missing = size

    @property
    def is_complete(self) -> bool:
        return self._missing <= 0

    def feed(self, data: bytes) -> bytes:
        self._missing -= len(data)
        return data


def parse_head(head: bytes) -> tuple[int, ChunkedBody | SizedBody]:
    """Return the status and a decoder of the body."""
    status_line, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    chunked = fields.get("transfer-encoding", "").lower() == "chunked"
    return int(status_line.split()[1]), ChunkedBody() if chunked else SizedBody(int(fields.get("content-length", 0)))


def error_text(body: bytes) -> str:
    try:
        return _decode_event(body).error
    except msgspec.MsgspecError:
        return body[:200].decode(errors="replace")


def first(value: str | list[str]) -> str:
    return value if isinstance(value, str) else (value[0] if value else "")
