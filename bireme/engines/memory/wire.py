"""What engines and the memory service say: msgpack in the packets of a Unix socket, descriptors beside it.

    service   Challenge     a nonce
    engine    HoldWeights   which weights, and proof that it knows the deployment's key
    service   Granted       map (the descriptors come along), fill, or wait (another Granted follows); the same proof
    engine    Publish       after fill: the descriptors of memory and table
    service   Holders       whenever it changes: how many engines have these weights

The connection is the engine's hold on the weights, or on the right to fill them: it ends with the engine, however that
ends. `Forget` stands in the place of `HoldWeights`, and is answered with `Done`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from bireme.errors import UnavailableError

SOCKET_NAME = "memory_service"  # in the run folder
NONCE_BYTES = 16
NUM_DESCRIPTORS = 2  # memory, and the table of what lies where
_MAX_PACKET = 64 << 10
_INT_BYTES = array("i").itemsize


class Challenge(msgspec.Struct, frozen=True, tag="c"):
    nonce: bytes


class HoldWeights(msgspec.Struct, frozen=True, tag="a"):
    weights: str  # equal where model folder, dtype, load_format, versions and device are
    worker: str
    nonce: bytes
    proof: bytes


class Forget(msgspec.Struct, frozen=True, tag="f"):
    """What no other one has used is freed."""

    worker: str
    nonce: bytes
    proof: bytes


class Granted(msgspec.Struct, frozen=True, tag="g"):
    role: Literal["map", "fill", "wait"]
    proof: bytes
    num_bytes: int = 0
    load_s: float = 0.0  # that it took to fill them


class Publish(msgspec.Struct, frozen=True, tag="p"):
    num_bytes: int
    load_s: float


class Holders(msgspec.Struct, frozen=True, tag="n"):
    num_engines: int


class Done(msgspec.Struct, frozen=True, tag="d"):
    num_bytes: int  # that were freed


class Refused(msgspec.Struct, frozen=True, tag="r"):
    error: str


Packet = Challenge | HoldWeights | Forget | Granted | Publish | Holders | Done | Refused
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Packet).decode


def socket_path(run_dir: Path) -> Path:
    return run_dir / SOCKET_NAME


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def prove(key: bytes, side: Literal["engine", "service"], nonce: bytes) -> bytes:
    """By the deployment's key, of the other side's nonce."""
    return hmac.digest(key, b"bireme memory service " + side.encode() + nonce, "sha256")


def send(link: socket.socket, packet: Packet, descriptors: tuple[int, ...] = (), *, waits: bool = True) -> None:
    """Raises OSError."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    link.sendmsg([_encode(packet)], rights, socket.MSG_NOSIGNAL | (0 if waits else socket.MSG_DONTWAIT))


def receive(link: socket.socket) -> tuple[Packet, tuple[int, ...]]:
    """Return a packet and its descriptors, which the caller closes.

    Raises UnavailableError at the end of the connection and for what is no packet, OSError (TimeoutError).
    """
    room = socket.CMSG_SPACE(NUM_DESCRIPTORS * _INT_BYTES)
    data, ancillary, flags, _ = link.recvmsg(_MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // _INT_BYTES * _INT_BYTES])
    try:
        if not data:
            raise UnavailableError("the other side has closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise UnavailableError("a packet is too long")
        return _decode(data), tuple(descriptors)
    except (UnavailableError, msgspec.MsgspecError, ValueError) as error:
        close_all(descriptors)
        raise UnavailableError(f"memory service: {error}") from error


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
