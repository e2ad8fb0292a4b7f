"""What several stubs of one worker and the broker between them and their engine say to each other.

A stub is a *slot*: a number from 1 on that the broker gives out once. The upper bits of an engine's consumer number are
the slot of the stub that reads it; the lowest consumer of a slot is the stub itself, the others are its bus
subscriptions. So a frame finds its reader without a table, and any stub can pass on commands for any consumer.

    stub -> broker    [ATTACH, Attach] [FRAME, command frame] [TELL, u32 slot or 0 for all others, u32 own slot, text]
                      [DETACH, u32 own slot]
    broker -> stub    [FRAME, step frame] [NEWS, News]
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

import msgspec

from bireme.config import Recipe
from bireme.errors import ConfigError
from bireme.messages import Hello

ATTACH, FRAME, TELL, DETACH, NEWS = b"a", b"f", b"t", b"d", b"n"
SLOT_BITS = 20
MAX_SLOT = (1 << (32 - SLOT_BITS)) - 2  # that of CONTROL is left out
MAX_SOCKET_PATH = 107  # bytes of sun_path, less the final zero


class Attach(msgspec.Struct, array_like=True):
    pid: int
    recipe: bytes  # of recipe_digest


class Attached(msgspec.Struct, array_like=True, tag="a"):
    slot: int
    broker_pid: int


class Peers(msgspec.Struct, array_like=True, tag="p"):
    """The slots of all stubs that are attached now."""

    slots: list[int]


class Ready(msgspec.Struct, array_like=True, tag="r"):
    """A life of the engine takes requests."""

    hello: Hello
    pid: int


class Ended(msgspec.Struct, array_like=True, tag="e"):
    """The life that was ready is over."""

    error: str


class State(msgspec.Struct, array_like=True, tag="s"):
    text: str  # why no life is ready


class NotStarted(msgspec.Struct, array_like=True, tag="f"):
    """The first start of the engine failed, and the broker ends; or this stub is not to share it."""

    error: str  # CODE: text


class Counted(msgspec.Struct, array_like=True, tag="m"):
    """What to publish; told to one stub alone."""

    delta: bytes


class Told(msgspec.Struct, array_like=True, tag="t"):
    """What another stub says."""

    slot: int
    text: bytes


News = Attached | Peers | Ready | Ended | State | NotStarted | Counted | Told
decode_news = msgspec.msgpack.Decoder(News).decode


def recipe_digest(recipe: Recipe) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(recipe), digest_size=16).digest()


def slot_of(consumer: int) -> int:
    return consumer >> SLOT_BITS


def socket_path(run_dir: Path, worker: str) -> str:
    """Return the path of the broker's socket. Raises ConfigError where the kernel would refuse it."""
    path = str(run_dir / f"{worker}.broker")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"{path}: too long for a socket; set BIREME_RUN_DIR to a shorter folder")
    return path


def take_lock(run_dir: Path, worker: str) -> int | None:
    """Return a descriptor of the lock that a worker's broker holds as long as it lives; None: one does."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been deleted
    descriptor = os.open(lock_path(run_dir, worker), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def lock_path(run_dir: Path, worker: str) -> Path:
    """The file holds the broker's process id."""
    return run_dir / f"{worker}.broker.lock"
