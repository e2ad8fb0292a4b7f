"""Shared-memory files: names, creation, copying, sweeping.

The creator of a file unlinks it, or uses it again (file_pool.py). The names carry run and worker, so that the
supervisor finds what a killed engine left.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from bireme.errors import BiremeError, ResourceExhaustedError, UnavailableError
from bireme.kv.transfer.chunks import Chunk
from bireme.kv.transfer.memory import TokenRows
from bireme.kv.transfer.piece_io import load_rows, store_rows

SHM_DIR = Path("/dev/shm")
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


def file_prefix(run_dir: Path, worker: str) -> str:
    """Return the common start of a worker's file names in all its lives; no other worker's files begin so."""
    run = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]
    return f"bireme-{run}-{worker}-"


def sweep(run_dir: Path, worker: str) -> int:
    """Unlink what a dead engine left: files in /dev/shm, which are counted, and its socket. Call it between lives."""
    prefix = file_prefix(run_dir, worker)
    files = [path for path in SHM_DIR.iterdir() if path.name.startswith(prefix)]
    for path in (*files, *run_dir.glob(f"kv-{worker}-*.sock")):
        path.unlink(missing_ok=True)
    return len(files)


class SharedFile:
    """One file, open. The creator writes it before anybody else learns its name.

    It is written and read by system calls: no page faults of a mapping.
    """

    __slots__ = ("_descriptor", "_path", "num_bytes", "num_wanted")

    def __init__(self, path: Path, descriptor: int, num_bytes: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.num_bytes = self.num_wanted = num_bytes  # its size, and what its present use needs of it

    @property
    def name(self) -> str:
        return self._path.name

    @classmethod
    def create(cls, name: str) -> SharedFile:
        """Make an empty file. Raises UnavailableError."""
        path = SHM_DIR / name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        path.unlink(missing_ok=True)  # left by an earlier life with the same number
        with _creation_errors(0):
            return cls(path, os.open(path, flags, 0o600), 0)

    @classmethod
    def open(cls, name: str, num_bytes: int) -> SharedFile:
        """Open another engine's file. Raises FileNotFoundError, or BiremeError when it is too small."""
        path = SHM_DIR / name
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        size = os.fstat(descriptor).st_size
        if size < num_bytes:
            os.close(descriptor)
            raise BiremeError(f"KV transfer file has {size} bytes; the offer says {num_bytes}")
        return cls(path, descriptor, size)

    def grow(self, num_bytes: int) -> None:
        """Reserve memory: a full /dev/shm is an error here, not in the middle of the copy.

        Raises ResourceExhaustedError when there is no room, UnavailableError when it can't be had at all.
        """
        if num_bytes > self.num_bytes:
            with _creation_errors(num_bytes):
                os.posix_fallocate(self._descriptor, self.num_bytes, num_bytes - self.num_bytes)
            self.num_bytes = num_bytes

    def trim(self) -> None:
        """Give back what its present use does not need."""
        if self.num_wanted < self.num_bytes:
            os.ftruncate(self._descriptor, self.num_wanted)
            self.num_bytes = self.num_wanted

    def rename(self, name: str) -> None:
        """Nobody finds it by its old name. Raises OSError."""
        path = SHM_DIR / name
        self._path.rename(path)
        self._path = path

    def store(self, rows: TokenRows, chunk: Chunk) -> None:
        """Copy a chunk's rows into the file."""
        store_rows(self._descriptor, rows, chunk, chunk.begin)

    def load(self, rows: TokenRows, chunk: Chunk) -> None:
        """Copy a chunk out of the file into its rows."""
        load_rows(self._descriptor, rows, chunk, chunk.begin)

    def close(self) -> None:
        """Let go of it; the file stays until `unlink`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def unlink(self) -> None:
        self._path.unlink(missing_ok=True)


def free_bytes() -> int:
    stat = os.statvfs(SHM_DIR)
    return stat.f_bavail * stat.f_frsize


@contextlib.contextmanager
def _creation_errors(num_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ResourceExhaustedError(
                f"KV transfer: no room for {num_bytes} bytes in {SHM_DIR} ({free_bytes()} bytes free); enlarge it"
                " (docker run --shm-size) or lower cache_transceiver_config.max_tokens_in_buffer"
            ) from error
        raise UnavailableError(
            f"KV transfer: no shared-memory file can be made in {SHM_DIR}: {error.strerror}"
        ) from error
