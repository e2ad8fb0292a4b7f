"""The folder of a group of frontend processes, and the group's end when its parent is killed.

A parent holds its folder's lock for as long as it lives. The members of a dead one serve on, so that the port stays
open, until the launch has started the next group and that one serves: it tells them, they drain and end. Without a
launch that would start one, they end at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import tempfile
import time
from pathlib import Path

from bireme.discovery.pulse import SHM
from bireme.launch import processes

_PREFIX = "bireme-frontend-"
_CHECK_S = 0.5
_LOCK, _SUCCEEDED = "lock", "succeeded"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class GroupFolder:
    """A context manager; used by the group's parent."""

    def __init__(self, launch: int) -> None:
        """`launch`: pid of the process that starts another group when this one dies; 0: none does."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{launch}-"))
        new = self.path / "lock.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)  # so that it is never seen unlocked

    def __enter__(self) -> GroupFolder:
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self.path)
        os.close(self._lock)


class DeadGroup:
    """A killed parent's remains: its folder, and members that may still serve."""

    def __init__(self, path: Path) -> None:
        self._path = path
        pids = filter(None, map(_listener, path.glob("*.sock")))  # each listens on a socket of its own
        self._members = [(pid, processes.started_at(pid)) for pid in pids]

    def succeed(self) -> None:
        """Tell the members that another group serves now."""
        with contextlib.suppress(FileNotFoundError):
            (self._path / _SUCCEEDED).touch()

    def kill(self) -> None:
        processes.kill_all(self._members)

    def remove(self) -> bool:
        """Remove the folder once no member lives; return whether it is gone."""
        if processes.survivors(self._members):
            return False
        _remove(self._path)
        return True


def dead_groups(launch: int) -> list[DeadGroup]:
    """Return the groups that this launch's group follows; remove all others without a living member."""
    followed = []
    for path in filter(_is_abandoned, Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*")):
        group = DeadGroup(path)
        if not group.remove() and launch and path.name.startswith(f"{_PREFIX}{launch}-"):
            followed.append(group)
    return followed


def leave(folder: Path) -> None:
    """Remove a dead parent's folder with its last member; for a member that takes no connections any more."""
    if _is_abandoned(folder):
        DeadGroup(folder).remove()


def wait_for_successor(folder: Path, launch: int, start: int | None) -> None:
    """Return when the members of a dead parent are to end: others serve, or none will be started.

    `start`: when the launch's process began, which tells it from another with its pid.
    """
    while folder.exists() and not (folder / _SUCCEEDED).exists():
        if not processes.survivors([(launch, start)]):
            return
        time.sleep(_CHECK_S)


def _is_abandoned(path: Path) -> bool:
    """Whether it is the folder of a dead parent. Not of another user's."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _listener(path: Path) -> int | None:
    """Return the pid of the process that listens on a Unix socket; a stopped one, too, takes the connection."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except OSError:
            return None
        pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return int(pid) or None


def _remove(path: Path) -> None:
    for pulse in SHM.glob(f"{path.name}_pulse_*"):
        pulse.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
