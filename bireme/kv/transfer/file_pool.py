"""Files in /dev/shm that transfers use one after the other.

Making pages costs more than copying into them. Only a file whose reader has said that it reads no more is kept, under
another name for each use.
"""

from __future__ import annotations

import itertools
import threading
import time

from bireme.errors import ResourceExhaustedError
from bireme.kv.transfer.shm_file import SharedFile

MOST_SPARE = 8  # files, each a descriptor or two of both sides
KEEP_S = 10.0  # for so long a file is kept that nobody uses: other workers need room in /dev/shm, too


class FilePool:
    """Files of one exporter; together no larger than the buffer, or than what is under way.

    `take` is for the copier's thread, everything else for the control thread.
    """

    def __init__(self, prefix: str) -> None:
        """`prefix`: of the names; no other process's."""
        self.limit_bytes = 0
        self._prefix, self._count = prefix, itertools.count()
        self._lock = threading.Lock()
        self._used: set[SharedFile] = set()
        self._spare: dict[SharedFile, float] = {}  # since when; the oldest first

    def take(self, num_bytes: int) -> SharedFile:
        """Return a file with memory for so much. Raises ResourceExhaustedError, UnavailableError."""
        with self._lock:
            file = self._choose(num_bytes)
            file.num_wanted = num_bytes
            self._used.add(file)
            self._make_room(max(0, num_bytes - file.num_bytes))
        try:
            self._grow(file, num_bytes)
        except BaseException:
            self.give(file, is_read=False)
            raise
        return file

    def give(self, file: SharedFile, is_read: bool) -> None:
        """Its transfer has ended. `is_read`: nobody reads it any more."""
        with self._lock:
            self._used.discard(file)
            if is_read and self._rename(file, "spare-"):
                self._spare[file] = time.monotonic()
                self._make_room(0)
            else:
                _remove(file, is_read)

    def tidy(self) -> None:
        """Remove what nobody has used for long."""
        with self._lock:
            self._drop_spare(used_before=time.monotonic() - KEEP_S)

    def close(self) -> None:
        with self._lock:
            self._drop_spare()

    def _choose(self, num_bytes: int) -> SharedFile:
        """Return the smallest spare file that is large enough, the largest, or a new one."""
        fitting = [file for file in self._spare if file.num_bytes >= num_bytes]
        file = min(
            fitting or self._spare, key=lambda file: file.num_bytes if fitting else -file.num_bytes, default=None
        )
        if file is not None:
            del self._spare[file]
            if self._rename(file):
                return file
            _remove(file, is_read=True)
        return SharedFile.create(self._next_name())

    def _make_room(self, num_bytes: int) -> None:
        """Give back what is not needed until so much more fits into the limit."""

        def excess() -> int:
            return sum(file.num_bytes for file in (*self._used, *self._spare)) + num_bytes - self.limit_bytes

        while self._spare and (excess() > 0 or len(self._spare) > MOST_SPARE):
            self._drop_oldest()
        if excess() > 0:
            for file in self._used:
                file.trim()

    def _grow(self, file: SharedFile, num_bytes: int) -> None:
        try:
            file.grow(num_bytes)
        except ResourceExhaustedError:
            with self._lock:
                self._drop_spare()
            file.grow(num_bytes)

    def _drop_spare(self, used_before: float = float("inf")) -> None:
        while self._spare and next(iter(self._spare.values())) < used_before:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        file = next(iter(self._spare))
        del self._spare[file]
        _remove(file, is_read=True)

    def _rename(self, file: SharedFile, kind: str = "") -> bool:
        """Return whether the file was still there."""
        try:
            file.rename(self._next_name(kind))
        except OSError:
            return False
        return True

    def _next_name(self, kind: str = "") -> str:
        return f"{self._prefix}{kind}{next(self._count)}"


def _remove(file: SharedFile, is_read: bool) -> None:
    """Its memory is free when nobody has it open; at once where nobody reads it."""
    file.unlink()
    if is_read:
        file.num_wanted = 0
        file.trim()
    file.close()
