"""A sign of life: a counter in a small file that a process moves on while its event loop turns.

    pulse = own_pulse()   # None outside of a launch
    pulse.beat()          # every BEAT_S, on that loop; `run` does

In /dev/shm under BIREME_SHM_PREFIX: rewriting needs no space there, and an open file outlives its removal.
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
import weakref
from contextlib import suppress
from pathlib import Path

BEAT_S = 0.5
SHM = Path("/dev/shm")
_RECORD = struct.Struct("<QQQ")  # beats, open requests, whether it asks to be replaced
_NAME = re.compile(r"pulse_(\d+)$")


class Pulse:
    """The writer; of one thread."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and leaves no file then."""
        self._path = path
        self._count = 0
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            self.beat()
        except OSError:  # /dev/shm is full: a file is made there even so
            os.close(self._descriptor)
            self.remove()
            raise

    def beat(self, num_requests: int = 0, is_worn: bool = False) -> None:
        """`is_worn`: another process should take this one's place."""
        self._count += 1
        os.pwrite(self._descriptor, _RECORD.pack(self._count, num_requests, is_worn), 0)

    async def run(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)

    def remove(self) -> None:
        """Say that no beats follow."""
        self._path.unlink(missing_ok=True)


class PulseReader:
    """Of another process's pulse."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, prefix: str, pid: int) -> PulseReader | None:
        """Return None for a process without a pulse."""
        try:
            descriptor = os.open(pulse_path(prefix, pid), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if os.fstat(descriptor).st_size < _RECORD.size:  # the first beat is yet to come
            os.close(descriptor)
            return None
        return cls(descriptor)

    def count(self) -> int | None:
        """Return the beats so far; None: removed, and silence means nothing."""
        if not os.fstat(self._descriptor).st_nlink:
            return None
        return self._read()[0]

    def is_idle(self) -> bool:
        """Whether it had no request at its last beat."""
        return self._read()[1] == 0

    def is_worn(self) -> bool:
        return bool(self._read()[2])

    def close(self) -> None:
        self._close()

    def _read(self) -> tuple[int, int, int]:
        count, num_requests, is_worn = _RECORD.unpack(os.pread(self._descriptor, _RECORD.size, 0))
        return count, num_requests, is_worn


def pulse_path(prefix: str, pid: int) -> Path:
    return SHM / f"{prefix}pulse_{pid}"


def has_writer(path: Path) -> bool:
    """Return whether a living process writes it; true where /proc doesn't say."""
    if (match := _NAME.search(path.name)) is None:
        return False
    folder = Path("/proc", match[1], "fd")
    try:
        descriptors = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended; the pid may be another user's
        return False
    except OSError:  # this process has no descriptor or memory left
        return True
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile
            if Path(os.readlink(folder / descriptor)).name == path.name:
                return True
    return False


def own_pulse() -> Pulse | None:
    """None: no launch watches, or /dev/shm takes no file."""
    prefix = os.environ.get("BIREME_SHM_PREFIX")
    if not prefix:
        return None
    try:
        return Pulse(pulse_path(prefix, os.getpid()))
    except OSError:
        return None
