"""Messages of stub and child over their socket pair: length-prefixed msgpack, one answer a job."""

from __future__ import annotations

import socket
import struct

import msgspec

from bireme.logits.application import LogitsJob

_LENGTH = struct.Struct("<Q")
_MAX_FRAME_BYTES = 8 << 30  # more means a corrupt stream


class LogitsReply(msgspec.Struct, frozen=True):
    """Logits, or an error in its wire form. The first one is empty: the child is ready."""

    logits: bytes = b""
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_job = msgspec.msgpack.Decoder(LogitsJob).decode
_decode_answer = msgspec.msgpack.Decoder(LogitsReply).decode


def send(channel: socket.socket, message: LogitsJob | LogitsReply) -> None:
    """Raises OSError, TimeoutError among them."""
    payload = _encode(message)
    channel.sendall(_LENGTH.pack(len(payload)))
    channel.sendall(payload)


def receive_job(channel: socket.socket) -> LogitsJob:
    return _decode_job(_receive(channel))


def receive_answer(channel: socket.socket) -> LogitsReply:
    return _decode_answer(_receive(channel))


def _receive(channel: socket.socket) -> bytearray:
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size))
    if length > _MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes")
    return _read(channel, length)


def _read(channel: socket.socket, num_bytes: int) -> bytearray:
    """Raises EOFError when the other side is gone."""
    buffer = bytearray(num_bytes)
    view, at = memoryview(buffer), 0
    while at < num_bytes:
        count = channel.recv_into(view[at:])
        if not count:
            raise EOFError("the other side has closed its end")
        at += count
    return buffer
