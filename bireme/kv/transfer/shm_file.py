"""Shared-memory files: names, creation, copying, sweeping.

The creator of a file unlinks it. The names carry run and worker, so that the supervisor finds what a killed engine
left.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
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

    __slots__ = ("_descriptor", "_path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @property
    def name(self) -> str:
        return self._path.name

    @classmethod
    def create(cls, next_name: Callable[[], str], num_bytes: int) -> SharedFile:
        """Make a file with its memory reserved: a full /dev/shm is an error here, not in the middle of the copy.

        Raises ResourceExhaustedError when there is no room, UnavailableError when it can't be made at all.
        """
        try:
            path, descriptor = _open_new(next_name)
        except OSError as error:
            raise _creation_error(error, num_bytes) from error
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise _creation_error(error, num_bytes) from error
        return cls(path, descriptor)

    @classmethod
    def open(cls, name: str, num_bytes: int) -> SharedFile:
        """Open another engine's file. Raises FileNotFoundError, or BiremeError for a wrong size."""
        path = SHM_DIR / name
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        size = os.fstat(descriptor).st_size
        if size != num_bytes:
            os.close(descriptor)
            raise BiremeError(f"KV transfer file has {size} bytes; the offer says {num_bytes}")
        return cls(path, descriptor)

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


def _open_new(next_name: Callable[[], str]) -> tuple[Path, int]:
    while True:
        path = SHM_DIR / next_name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(FileExistsError):  # left by an earlier life with the same number
            return path, os.open(path, flags, 0o600)


def _creation_error(error: OSError, num_bytes: int) -> BiremeError:
    if error.errno in _NO_ROOM:
        return ResourceExhaustedError(
            f"KV transfer: no room for {num_bytes} bytes in {SHM_DIR} ({free_bytes()} bytes free); enlarge it"
            " (docker run --shm-size) or lower cache_transceiver_config.max_tokens_in_buffer"
        )
    return UnavailableError(f"KV transfer: no shared-memory file can be made in {SHM_DIR}: {error.strerror}")
