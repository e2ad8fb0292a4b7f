"""The run folder of one launch (key, sockets, model links), and the removal of all that a launch leaves.

It is `bireme-<uid>/<pid>-<random>` under $XDG_RUNTIME_DIR or /tmp, mode 0700. By its owner's lock the next launch tells
whether the owner was killed, also across containers. Cleaners of temporary files find the folder locked
(systemd-tmpfiles) and its files new; what is removed nevertheless, as by logind, the owner restores.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from bireme import private_files
from bireme.discovery import live_settings
from bireme.discovery.pulse import has_writer
from bireme.discovery.run_folder import DRAIN, SLEEP, make_private
from bireme.engines.memory.wire import SOCKET_NAME
from bireme.errors import ConfigError
from bireme.kv.transfer import shm_file
from bireme.launch import processes

SHM = Path("/dev/shm")
_LOCK = "lock"
_REMEDY = "set XDG_RUNTIME_DIR to a folder of your own"
_RECIPE = "recipe"  # of a launch without a recipe folder: needed for as long as the launch lasts
RESPONSES, FILES = "responses", "files"  # the frontend's; they outlive a server
_KEPT = (_LOCK, SOCKET_NAME, DRAIN, live_settings.FILE_NAME)  # over a server's end
_OWN = (_RECIPE, "models", "backends", "lib")  # folders that the launcher fills; its children make the others


class RunFolder:
    """Owned by one process."""

    def __init__(self, base: Path | None = None) -> None:
        """Make one, and sweep those of killed launches. Raises ConfigError."""
        base = base or default_base()
        self.path, lock = _new_folder(base)
        self._lock: int | None = lock
        self._folder_lock = _lock_folder(self.path)
        sweep_stale(base)
        self._own: dict[Path, str | bytes] = {}  # path -> a link's target, a file's content
        self._mutex = threading.Lock()  # `restore` has a thread of its own
        self._is_removed = False

    @property
    def _recipe(self) -> Path:
        return self.path / _RECIPE

    @property
    def shm_prefix(self) -> str:
        return _shm_prefix(self.path)

    def sweep_shared_memory(self) -> list[str]:
        """Unlink what an ended server left in /dev/shm, but others' pulses; return the names."""
        return _sweep_shared_memory(self.path, keeps_pulses=True)

    def shut_shared_memory(self) -> None:
        """Take regions of models that do not do so themselves from other users."""
        for path in SHM.glob(f"{self.shm_prefix}*"):
            private_files.shut_file(path)

    def remember(self) -> None:
        """Note the launcher's own small files, for `restore`."""
        with self._mutex:
            paths = [path for name in _OWN for path in (self.path / name).rglob("*")]
            self._own = {path: _content(path) for path in paths if path.is_symlink() or path.is_file()}

    def restore(self) -> int:
        """Restore folder, lock and what was noted; return how many were missing."""
        with self._mutex:
            if self._is_removed:
                return 0
            is_gone = self._lock is None or not os.fstat(self._lock).st_nlink
            if is_gone:
                make_private(self.path.parent, _REMEDY)
                self.path.mkdir(mode=0o700, exist_ok=True)
                if self._lock is not None:
                    os.close(self._lock)
                self._lock = _take_lock(self.path)
                os.close(self._folder_lock)
                self._folder_lock = _lock_folder(self.path)
            missing = [path for path in self._own if not os.path.lexists(path)]
            for path in missing:
                path.parent.mkdir(parents=True, exist_ok=True)
                content = self._own[path]
                path.symlink_to(content) if isinstance(content, str) else path.write_bytes(content)
            return len(missing) + is_gone

    def touch(self) -> None:
        for folder, folders, files in os.walk(self.path):
            for name in (*folders, *files, "."):
                with contextlib.suppress(OSError):  # gone meanwhile, or a link's target is another user's
                    os.utime(Path(folder, name), follow_symlinks=False)

    def clear(self) -> None:
        """Empty it for the next server, or make it again.

        What frontend and memory service keep stays; so does what an operator has asked for.
        """
        self.sweep_shared_memory()
        with self._mutex:
            self._own = {path: content for path, content in self._own.items() if path.is_relative_to(self._recipe)}
        self.restore()
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                if entry != self._recipe and entry.name not in (RESPONSES, FILES):
                    shutil.rmtree(entry, ignore_errors=True)
            elif entry.name not in _KEPT and entry.suffix not in (SLEEP, f".{DRAIN}"):
                entry.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete all that carries its name, stopped processes that can't end included; from any thread, and again."""
        with contextlib.suppress(OSError):  # /proc can't be read just now
            processes.kill_all(_orphans(self.path))
        _sweep_shared_memory(self.path)
        with self._mutex:
            self._is_removed, lock, self._lock = True, self._lock, None
        shutil.rmtree(self.path, ignore_errors=True)
        if lock is not None:
            os.close(lock)
            os.close(self._folder_lock)
        with contextlib.suppress(OSError):  # the last launch removes the user's folder as well
            self.path.parent.rmdir()


def default_base() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"bireme-{os.getuid()}"


def sweep_stale(base: Path) -> list[Path]:
    """Remove what dead launches left; return their folders."""
    swept = []
    for folder in launches(base):
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
    """Yield stopped processes, and those that wait in their dead server's IPC."""
    prefix = _shm_prefix(folder)
    for pid in processes.all_pids():
        with contextlib.suppress(PermissionError):  # another user's
            is_stub = any(argument.startswith(prefix) for argument in processes.command_line(pid))
            if pid != os.getpid() and (is_stub or f"BIREME_SHM_PREFIX={prefix}" in processes.environment(pid)):
                yield pid, processes.started_at(pid)


def _lock_folder(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system that has no such locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def _content(path: Path) -> str | bytes:
    return os.readlink(path) if path.is_symlink() else path.read_bytes()


def launches(base: Path) -> list[Path]:
    """Also those of killed launches."""
    return [folder for folder in sorted(base.glob("*-*")) if (folder / _LOCK).is_file()]


def only_launch() -> Path:
    """Raises ConfigError where there is none, or more than one."""
    found = launches(default_base())
    if len(found) != 1:
        names = "".join(f"\n  {folder}" for folder in found)
        raise ConfigError(f"{len(found)} launches in {default_base()}; name one with --run-folder{names}")
    return found[0]


def _shm_prefix(folder: Path) -> str:
    return f"bireme_{folder.name}_"


def _sweep_shared_memory(folder: Path, *, keeps_pulses: bool = False) -> list[str]:
    """`keeps_pulses`: those of living processes."""
    names = []
    all_workers = shm_file.file_prefix(folder, "").removesuffix("-")
    for prefix in (_shm_prefix(folder), all_workers):
        for path in SHM.glob(f"{prefix}*"):
            if keeps_pulses and has_writer(path):
                continue
            with contextlib.suppress(OSError):  # gone meanwhile
                path.unlink()
                names.append(path.name)
    return names


def _new_folder(base: Path) -> tuple[Path, int]:
    """Others may remove an empty base, or sweep the folder before it is locked: then again."""
    while True:
        folder = base / f"{os.getpid()}-{secrets.token_hex(3)}"
        with contextlib.suppress(FileNotFoundError):
            make_private(base, _REMEDY)
            folder.mkdir(mode=0o700)
            lock = _take_lock(folder)
            if lock is None:
                continue
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def _take_lock(folder: Path) -> int | None:
    """None: another process holds it."""
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
