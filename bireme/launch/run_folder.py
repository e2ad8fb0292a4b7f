"""The run folder of one launch: key, sockets, model links; and the sweeping of all that a launch leaves.

A folder is `bireme-<uid>/<pid>-<random>` under $XDG_RUNTIME_DIR or /tmp, mode 0700. Its owner holds a lock
in it, so that the next launch can tell a folder whose owner was killed (and remove it, with its shared
memory) from one in use, also by another container that shares the file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from bireme.errors import ConfigError
from bireme.kv.transfer import shm_file
from bireme.launch import processes

SHM = Path("/dev/shm")
_LOCK = "lock"


class RunFolder:
    """Owned by one process; `remove` takes back everything that carries its name."""

    def __init__(self, base: Path | None = None) -> None:
        """Make a new folder, and sweep those that killed launches left. Raises ConfigError."""
        base = base or default_base()
        _make_private(base)
        sweep_stale(base)
        self.path = base / f"{os.getpid()}-{secrets.token_hex(3)}"
        self.path.mkdir(mode=0o700)
        self._lock = _take_lock(self.path)

    @property
    def shm_prefix(self) -> str:
        """How the names of this launch's files in /dev/shm begin."""
        return _shm_prefix(self.path)

    def sweep_shared_memory(self) -> list[str]:
        """Unlink the launch's files in /dev/shm, once no process uses them; return their names."""
        return _sweep_shared_memory(self.path)

    def clear(self) -> None:
        """Empty it for another life of the server."""
        self.sweep_shared_memory()
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink(missing_ok=True)

    def remove(self) -> None:
        self.sweep_shared_memory()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        with contextlib.suppress(OSError):  # the last one out removes the user's folder as well
            self.path.parent.rmdir()


def default_base() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"bireme-{os.getuid()}"


def sweep_stale(base: Path) -> list[Path]:
    """Remove the run folders of launches that are no more, and their shared memory; return the folders."""
    swept = []
    for folder in _launches(base):
        lock = _take_lock(folder)
        if lock is None:
            continue
        processes.kill_all(_orphans(folder))
        _sweep_shared_memory(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        swept.append(folder)
    return swept


def _orphans(folder: Path) -> Iterator[tuple[int, int | None]]:
    """Yield a dead launch's stubs: one that waits inside its dead server's IPC never ends by itself."""
    for pid in processes.all_pids():
        if any(argument.startswith(_shm_prefix(folder)) for argument in processes.command_line(pid)):
            yield pid, processes.started_at(pid)


def _launches(base: Path) -> Iterator[Path]:
    return (folder for folder in sorted(base.glob("*-*")) if (folder / _LOCK).is_file())


def _shm_prefix(folder: Path) -> str:
    return f"bireme_{folder.name}_"


def _sweep_shared_memory(folder: Path) -> list[str]:
    """Unlink the Python backend's regions and the KV files of engines that were killed with their stubs."""
    names = []
    all_workers = shm_file.file_prefix(folder, "").removesuffix("-")
    for prefix in (_shm_prefix(folder), all_workers):
        for path in SHM.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):  # gone meanwhile
                path.unlink()
                names.append(path.name)
    return names


def _make_private(base: Path) -> None:
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{base} belongs to user {status.st_uid} or is no folder; remove it or set XDG_RUNTIME_DIR")
    if status.st_mode & 0o077:
        base.chmod(0o700)


def _take_lock(folder: Path) -> int | None:
    """Return the lock's descriptor, or None while another process holds it."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # its owner has just removed it
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
