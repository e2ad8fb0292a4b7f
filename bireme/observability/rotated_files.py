"""Lines in files that are bounded: a full one is set aside under a number and compressed, the oldest go.

    PATH.NAME.jsonl              being written, locked
    PATH.NAME.000041.jsonl.gz    set aside; higher numbers are later

A second process of one name writes PATH.NAME-2.jsonl, and so on. All have mode 0600. A line is in the file as a whole
or not at all, whatever the disk does.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bireme.errors import ConfigError

MAX_PROCESSES = 128  # of one name
_COMPRESSION = 1  # of records, to 35% of their bytes; 9: to 32%, in four times the CPU time
_PIECE_BYTES = 256 << 10  # compressed at a time
_END, _PACKED = ".jsonl", ".gz"


class RotatedFiles:
    """Used by one thread. The lock ends with the process."""

    def __init__(self, path: Path, name: str, max_bytes: int, max_files: int) -> None:
        """Nothing is made before the first line. Raises ConfigError where nothing can be."""
        self._path, self._name, self._max_files = path, name, max_files
        self.max_bytes = max_bytes  # of a file, where a single write is not larger
        self._stem = path.with_name(f"{path.name}.{name}")
        self._packing: Iterator[None] = iter(())
        self._descriptor: int | None = None
        self._num_bytes = 0
        check_writable(path)

    @property
    def _current(self) -> Path:
        return Path(f"{self._stem}{_END}")

    def pack_on(self) -> bool:
        """Compress a piece of what was set aside; return whether there is more."""
        return next(self._packing, self) is None

    def write(self, lines: bytes) -> None:
        """Append whole lines. Raises OSError, and none of them is in the file."""
        if self._descriptor is None:
            self._take_name()
        elif not os.fstat(self._descriptor).st_nlink:  # somebody has removed it
            self._close()
            self._take_name()
        if self._num_bytes and self._num_bytes + len(lines) > self.max_bytes:
            self._set_aside()
        self._append(lines)

    def close(self) -> None:
        for _ in self._packing:
            pass
        self._close()

    def _take_name(self) -> None:
        """Open the first file that is no other process', and set aside what one before has left in it."""
        for number in range(1, MAX_PROCESSES + 1):
            suffix = f"-{number}" if number > 1 else ""
            self._stem = self._path.with_name(f"{self._path.name}.{self._name}{suffix}")
            if self._open():
                break
        else:
            raise BlockingIOError(f"{MAX_PROCESSES} processes write {self._path}.{self._name} already")
        for left in self._stem.parent.glob(f"{self._stem.name}.*{_PACKED}.part"):
            left.unlink(missing_ok=True)
        if self._num_bytes:
            self._set_aside()  # it may end within a line

    def _open(self) -> bool:
        """Return false: it is another process'."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._current, flags, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            is_own = os.path.samestat(status, os.stat(self._current))  # else another one has just set it aside
        except BlockingIOError:
            is_own = False
        except OSError:
            os.close(descriptor)
            raise
        if not is_own:
            os.close(descriptor)
            return False
        self._num_bytes = status.st_size
        self._descriptor = descriptor
        return True

    def _append(self, lines: bytes) -> None:
        assert self._descriptor is not None
        try:
            if os.write(self._descriptor, lines) == len(lines):
                self._num_bytes += len(lines)
                return
            raise OSError("the disk took a part of the lines")
        except OSError:
            try:
                os.ftruncate(self._descriptor, self._num_bytes)
            except OSError:
                self._close()  # the next line goes into another file
            raise

    def _set_aside(self) -> None:
        for _ in self._packing:  # the one before; it had the time of a whole file
            pass
        aside = Path(f"{self._stem}.{self._next_number():06}{_END}")
        self._current.rename(aside)
        self._close()
        self._packing = _pack(aside)
        for _, old in self._aside()[: -self._max_files]:
            old.unlink(missing_ok=True)
        self._take_name()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _aside(self) -> list[tuple[int, Path]]:
        """Return those set aside, the oldest first."""
        pattern = re.compile(rf"{re.escape(self._stem.name)}\.(\d+){re.escape(_END)}({re.escape(_PACKED)})?")
        found = ((pattern.fullmatch(path.name), path) for path in self._stem.parent.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match)

    def _next_number(self) -> int:
        aside = self._aside()
        return aside[-1][0] + 1 if aside else 1


def _pack(plain: Path) -> Iterator[None]:
    """Compress a file in pieces; it stays as it is where that fails."""
    packed = plain.with_name(plain.name + _PACKED)
    part = packed.with_name(packed.name + ".part")
    try:
        with plain.open("rb") as source, open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as raw:
            with gzip.GzipFile("", "wb", _COMPRESSION, raw) as target:
                while piece := source.read(_PIECE_BYTES):
                    target.write(piece)
                    yield
        part.replace(packed)
        plain.unlink()
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise ConfigError where no file can be made whose name begins with `path`; leave none."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ConfigError(
            f"observability.request_log.path: {path}: can't be written: {error.strerror or error}; name a folder that"
            " is there and that this user may write, and in it the beginning of the files' names"
        ) from error
    os.close(descriptor)
    Path(name).unlink(missing_ok=True)
