"""Whose own work an engine is in, in a few bytes of memory that its supervisor reads when the engine stands still.

A processor, guide or picture that never comes to its end holds up everybody in its engine. While a thread is in such
work of one request, a record of that thread says so. At a stall, or a crash, that request ends with the reason, and the
others move on. Nothing is written for requests that have no work of their own.

    with own_work.mark(key, Work.PROCESSORS):    # the engine's side: two short writes
        ...
    culprit_of(file.read(), still_s)             # the supervisor's
"""

from __future__ import annotations

import enum
import itertools
import mmap
import os
import struct
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from bireme.errors import RequestError

SUFFIX = ".w"  # of the file beside a life's sockets
_RECORD = struct.Struct("<IIqd")  # work, consumer, number, when it began
_KIND = struct.Struct("<I")
_NUM_RECORDS = 16  # the first is of the request that is tried alone, the others of threads
NUM_BYTES = _RECORD.size * _NUM_RECORDS


NO_MARK: AbstractContextManager[None] = nullcontext()  # where nobody looks whose work a thread is in


class Work(enum.IntEnum):
    NONE = 0
    PROCESSORS = 1
    GUIDE = 2
    PICTURES = 3
    ALONE = 4  # all that the engine does while this request is tried (child/trials.py)


_KINDS = {kind.value: kind for kind in Work}
_FIELDS = {Work.PROCESSORS: "logits_processors", Work.GUIDE: "guided_decoding", Work.PICTURES: "images"}


class Culprit(NamedTuple):
    """The request at fault."""

    consumer: int
    number: int
    work: Work

    def error(self, reason: str) -> RequestError:
        if self.work is Work.ALONE:
            return RequestError(
                f"the request was in an engine that stalled, and was tried alone in another one: {reason}; it is not"
                " moved again"
            )
        return RequestError(
            f"{_FIELDS[self.work]}: the engine was in this request's own work when it ended: {reason}; it is not moved"
            " to another one, make it simpler"
        )


class OwnWork:
    """The engine's side."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        """None: nobody reads it."""
        self._memory = bytearray(NUM_BYTES) if memory is None else memory
        self._offsets = itertools.count(_RECORD.size, _RECORD.size)
        self._thread = threading.local()

    @classmethod
    def open(cls, path: str) -> OwnWork:
        """Write into what the supervisor reads; where it has not been able to make a file, into nothing."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return cls()
        try:
            return cls(mmap.mmap(descriptor, NUM_BYTES))
        except (OSError, ValueError):
            return cls()
        finally:
            os.close(descriptor)

    def mark(self, key: tuple[int, int], work: Work) -> Mark:
        """Return what marks a thread's work as this request's; it may be used again and again."""
        return Mark(self, key, work)

    def write(self, offset: int, key: tuple[int, int], work: Work) -> None:
        _RECORD.pack_into(self._memory, offset, work, *key, time.monotonic())

    def clear(self, offset: int) -> None:
        _KIND.pack_into(self._memory, offset, Work.NONE)

    def try_alone(self, key: tuple[int, int] | None) -> None:
        """Say which request is tried alone; None: none is."""
        if key is None:
            self.clear(0)
        else:
            self.write(0, key, Work.ALONE)

    def offset(self) -> int:
        """Return where this thread's record is; threads beyond the last one share that."""
        try:
            found: int = self._thread.offset
        except AttributeError:
            found = self._thread.offset = min(next(self._offsets), NUM_BYTES - _RECORD.size)
        return found


class Mark:
    __slots__ = ("_key", "_own_work", "_work")

    def __init__(self, own_work: OwnWork, key: tuple[int, int], work: Work) -> None:
        self._own_work, self._key, self._work = own_work, key, work

    def __enter__(self) -> None:
        self._own_work.write(self._own_work.offset(), self._key, self._work)

    def __exit__(self, *exception: object) -> None:
        self._own_work.clear(self._own_work.offset())


class WorkFile:
    """The supervisor's side, of one life."""

    def __init__(self, path: Path) -> None:
        """What can't be made, for want of space, tells nothing."""
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.pwrite(self._descriptor, bytes(NUM_BYTES), 0)  # takes its space: a write to memory can't fail
        except OSError:
            self.close()
            path.unlink(missing_ok=True)

    def read(self) -> bytes:
        return os.pread(self._descriptor, NUM_BYTES, 0) if self._descriptor >= 0 else b""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def culprit_of(memory: bytes, still_s: float) -> Culprit | None:
    """Return whose work has held the engine up, which has stood still so long or, with 0, has crashed.

    Own work must have lasted for most of that time, and a request that is tried alone have begun before it. What a
    crash has written over tells nothing.
    """
    now = time.monotonic()
    records = [
        (now - began, Culprit(consumer, number, _KINDS.get(work, Work.NONE)))
        for work, consumer, number, began in _RECORD.iter_unpack(memory)
    ]
    own = [one for one in records[1:] if one[1].work is not Work.NONE and one[0] >= still_s / 2]
    if own:
        return max(own, key=lambda one: one[0])[1]
    if still_s and records and records[0][1].work is Work.ALONE and records[0][0] >= still_s:
        return records[0][1]
    return None
