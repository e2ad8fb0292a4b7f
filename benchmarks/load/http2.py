"""Just enough HTTP/2 to carry many gRPC streams over one connection at little cost.

grpcio spends 35-50 us of CPU a response, which on a small machine is taken from the server that is measured.
Here one read brings many frames, and a message costs about a quarter. The rule: what of the protocol is not
needed is either refused loudly or avoided by the settings that are sent (no header table, no push, windows
that never close on this side). Compressed messages, TLS and proxies are not supported.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 5, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS, PADDED = 4, 8
CANCEL = 8
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE = 1, 2, 4
DEFAULT_WINDOW, MAX_WINDOW = 65535, (1 << 31) - 1
MAX_FRAME = 16384
TOP_UP = 1 << 30  # received bytes after which the peer's window is refilled

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">HBBBI")  # length (16 + 8 bits), type, flags, stream
_PREFIX = struct.Struct(">BI")  # compressed, length


class StreamError(Exception):
    """The stream or its connection ended otherwise than by the peer's orderly close."""


class Stream:
    """One gRPC call. `on_message` gets each message, `on_end` once the reason: None, or what went wrong."""

    __slots__ = ("buffer", "connection", "is_open", "number", "on_end", "on_message", "outbox", "received", "window")

    def __init__(
        self,
        connection: Connection,
        number: int,
        on_message: Callable[[bytes], None],
        on_end: Callable[[StreamError | None], None],
    ) -> None:
        self.connection, self.number = connection, number
        self.on_message, self.on_end = on_message, on_end
        self.window = connection.initial_window
        self.outbox = bytearray()
        self.buffer = b""
        self.received = 0
        self.is_open = True  # our side

    def send(self, message: bytes) -> None:
        self.outbox += _PREFIX.pack(0, len(message)) + message
        self.connection.flush(self)

    def end(self) -> None:
        """Close our side; what is under way still comes."""
        if self.is_open:
            self.is_open = False
            self.connection.write(DATA, END_STREAM, self.number)

    def cancel(self) -> None:
        """Leave; `on_end` is not called."""
        if self.connection.streams.pop(self.number, None) is not None:
            self.connection.write(RST_STREAM, 0, self.number, struct.pack(">I", CANCEL))

    def receive(self, data: bytes) -> None:
        data = self.buffer + data if self.buffer else data
        at = 0
        while len(data) - at >= 5:
            is_compressed, size = _PREFIX.unpack_from(data, at)
            if is_compressed:
                raise StreamError("a compressed message, though none was asked for")
            if len(data) - at - 5 < size:
                break
            self.on_message(data[at + 5 : at + 5 + size])
            at += 5 + size
        self.buffer = data[at:]


class Connection(asyncio.Protocol):
    def __init__(self, authority: str) -> None:
        self.streams: dict[int, Stream] = {}
        self.is_closed = False
        self.initial_window = DEFAULT_WINDOW
        self._authority = authority
        self._window = DEFAULT_WINDOW
        self._next_number = 1
        self._received = 0
        self._buffer = b""
        self._transport: Any = None

    def open_stream(
        self, path: str, on_message: Callable[[bytes], None], on_end: Callable[[StreamError | None], None]
    ) -> Stream:
        stream = Stream(self, self._next_number, on_message, on_end)
        self._next_number += 2
        self.streams[stream.number] = stream
        self.write(HEADERS, END_HEADERS, stream.number, request_headers(self._authority, path))
        return stream

    def write(self, kind: int, flags: int, number: int, payload: bytes = b"") -> None:
        if self._transport is not None and not self.is_closed:
            self._transport.write(frame(kind, flags, number, payload))

    def flush(self, stream: Stream) -> None:
        """Send as much of a stream's messages as both windows allow."""
        while stream.outbox:
            size = min(len(stream.outbox), stream.window, self._window, MAX_FRAME)
            if size <= 0:
                return
            self.write(DATA, 0, stream.number, bytes(stream.outbox[:size]))
            del stream.outbox[:size]
            stream.window -= size
            self._window -= size

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: Any) -> None:  # uvloop's is not an asyncio.Transport
        self._transport = transport
        settings = {HEADER_TABLE_SIZE: 0, ENABLE_PUSH: 0, INITIAL_WINDOW_SIZE: MAX_WINDOW}
        transport.write(_PREFACE)
        self.write(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *item) for item in settings.items()))
        self.write(WINDOW_UPDATE, 0, 0, struct.pack(">I", MAX_WINDOW - DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._fail_all(f"connection lost{f': {exc}' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        at, size = 0, len(data)
        while size - at >= 9:
            high, low, kind, flags, number = _HEAD.unpack_from(data, at)
            end = at + 9 + (high << 8 | low)
            if end > size:
                break
            self._take(kind, flags, number & MAX_WINDOW, data[at + 9 : end])
            at = end
        self._buffer = data[at:]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == DATA:
            self._take_data(flags, number, payload)
        elif kind == HEADERS:
            if flags & END_STREAM:
                self._end(number, trailers_error(payload))
        elif kind == RST_STREAM:
            self._end(number, StreamError(f"reset by the server, code {int.from_bytes(payload, 'big')}"))
        elif kind == SETTINGS:
            if not flags & ACK:
                self._take_settings(payload)
        elif kind == PING:
            if not flags & ACK:
                self.write(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            self._take_window(number, int.from_bytes(payload, "big") & MAX_WINDOW)
        elif kind == GOAWAY:
            self._fail_all(f"the server is going away: {payload[8:].decode(errors='replace')}")
            self.close()
        elif kind == PUSH_PROMISE:
            self._fail_all("a push, though it was switched off")

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        stream = self.streams.get(number)
        self._received = self._top_up(0, self._received + len(payload))
        if stream is not None:
            stream.received = self._top_up(number, stream.received + len(payload))
            if flags & PADDED:
                payload = payload[1 : len(payload) - payload[0]]
            try:
                stream.receive(payload)
            except StreamError as error:
                self._end(number, error)
        if flags & END_STREAM:
            self._end(number, StreamError("ended without a status"))

    def _top_up(self, number: int, received: int) -> int:
        if received < TOP_UP:
            return received
        self.write(WINDOW_UPDATE, 0, number, struct.pack(">I", received))
        return 0

    def _take_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                for stream in self.streams.values():
                    stream.window += value - self.initial_window
                self.initial_window = value
        self.write(SETTINGS, ACK, 0)
        self._flush_all()

    def _take_window(self, number: int, increment: int) -> None:
        if number == 0:
            self._window += increment
            self._flush_all()
        elif stream := self.streams.get(number):
            stream.window += increment
            self.flush(stream)

    def _flush_all(self) -> None:
        for stream in list(self.streams.values()):
            self.flush(stream)

    def _end(self, number: int, error: StreamError | None) -> None:
        if stream := self.streams.pop(number, None):
            stream.on_end(error)

    def _fail_all(self, message: str) -> None:
        for number in list(self.streams):
            self._end(number, StreamError(message))


def frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, number) + payload


def request_headers(authority: str, path: str) -> bytes:
    """Return the header block of a gRPC call: static names, literal values, nothing indexed."""
    return b"".join(
        (
            b"\x83\x86",  # :method POST, :scheme http
            b"\x04" + _text(path),
            b"\x01" + _text(authority),
            b"\x0f\x10" + _text("application/grpc"),  # content-type
            b"\x00" + _text("te") + _text("trailers"),
        )
    )


def _text(value: str) -> bytes:
    assert len(value) < 127, "longer strings need a longer length"
    return bytes((len(value),)) + value.encode()


def trailers_error(block: bytes) -> StreamError | None:
    """Return what the trailers say; grpc-core writes them as plain literals to a peer without a header table."""
    status = literal(block, b"grpc-status")
    if status in ("0", ""):
        return None
    return StreamError(f"gRPC status {status} {literal(block, b'grpc-message')}".rstrip())


def literal(block: bytes, name: bytes) -> str:
    """Return the value after a literal name in a header block; empty when it is not there."""
    at = block.find(name)
    if at < 0 or at + len(name) >= len(block):
        return ""
    at += len(name)
    size = block[at] & 0x7F
    return block[at + 1 : at + 1 + size].decode(errors="replace")
