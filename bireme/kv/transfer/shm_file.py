"""Shared-memory files: names, creation, copying, sweeping.

The creator of a file unlinks it, or uses it again (file_pool.py). The names carry run and worker, so that the
supervisor finds what a killed engine left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bireme.errors import BiremeError, ResourceExhaustedError, UnavailableError
from bireme.kv.transfer.chunks import Chunk
from bireme.kv.transfer.memory import Bytes, TokenRows
from bireme.kv.transfer.row_copies import load_rows, store_rows

SHM_DIR = Path("/dev/shm")
_PAGE = mmap.PAGESIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_: many pages a call; before Linux 5.14 each has a fault of its own
_LIBC = ctypes.CDLL(None)  # a call through it leaves the GIL to others
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
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
    """One file, open and mapped. The creator writes a chunk before anybody else learns that it is there."""

    __slots__ = ("_descriptor", "_is_ours", "_memory", "_num_present", "_path", "num_bytes", "num_wanted")

    def __init__(self, path: Path, descriptor: int, num_bytes: int, is_ours: bool) -> None:
        self._path = path
        self._descriptor = descriptor
        self._is_ours = is_ours
        self._memory: Bytes | None = None
        self._num_present = 0  # bytes of it whose pages are mapped
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
            return cls(path, os.open(path, flags, 0o600), 0, is_ours=True)

    @classmethod
    def open(cls, name: str, num_bytes: int) -> SharedFile:
        """Open another engine's file. Raises FileNotFoundError, or BiremeError when it is too small."""
        path = SHM_DIR / name
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        size = os.fstat(descriptor).st_size
        if size < num_bytes:
            os.close(descriptor)
            raise BiremeError(f"KV transfer file has {size} bytes; the offer says {num_bytes}")
        return cls(path, descriptor, size, is_ours=False)

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
            self._num_present = min(self._num_present, self.num_bytes)

    @property
    def identity(self) -> int:
        """Which no other file has while this one is open, whatever it is called."""
        return os.fstat(self._descriptor).st_ino

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    @property
    def has_name(self) -> bool:
        return os.fstat(self._descriptor).st_nlink > 0

    def rename(self, name: str) -> None:
        """Nobody finds it by its old name. Raises OSError."""
        path = SHM_DIR / name
        self._path.rename(path)
        self._path = path

    def store(self, rows: TokenRows, chunk: Chunk) -> None:
        """Copy a chunk's rows into the file."""
        store_rows(rows, chunk, self._map(chunk))

    def load(self, rows: TokenRows, chunk: Chunk) -> None:
        """Copy a chunk out of the file into its rows."""
        load_rows(rows, chunk, self._map(chunk))

    def close(self) -> None:
        """Let go of it; the file stays until `unlink`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._memory = -1, None

    def unlink(self) -> None:
        self._path.unlink(missing_ok=True)

    def _map(self, chunk: Chunk) -> Bytes:
        """Return a chunk's memory, with its pages."""
        if self._memory is None or len(self._memory) < chunk.end:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if self._is_ours else 0)
            mapped = mmap.mmap(self._descriptor, self.num_bytes, prot=protection)
            self._memory, self._num_present = np.frombuffer(mapped, np.uint8), 0
        if self._num_present < chunk.end:
            begin = self._num_present // _PAGE * _PAGE
            advice = _POPULATE_WRITE if self._is_ours else _POPULATE_READ
            _LIBC.madvise(self._memory.ctypes.data + begin, chunk.end - begin, advice)
            self._num_present = chunk.end
        return self._memory[chunk.begin : chunk.end]


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
