"""Files and folders that no other user of the host can read."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def make_folder(folder: Path) -> None:
    """Make it, with those above it, or take an existing one from the other users. Raises OSError.

    One that belongs to another user, such as a volume that is mounted, keeps its mode.
    """
    if not folder.is_dir():
        if folder.parent != folder and not folder.parent.is_dir():
            make_folder(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)
    _shut(folder, 0o700)


def make_database(path: Path) -> None:
    """Make an empty SQLite file, or take an existing one and SQLite's own beside it from the other users.

    Files that SQLite makes later have the first one's mode. Raises OSError.
    """
    with suppress(FileExistsError):  # one that is there is not opened: closing it would free SQLite's locks on it
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        shut_file(path.with_name(name))


def _shut(path: Path, mode: int) -> None:
    status = path.stat()
    if status.st_uid == os.getuid() and status.st_mode & 0o077:
        path.chmod(mode)


def replace_file(path: Path, content: bytes) -> None:
    """Write it anew, for others at once or not at all. Raises OSError."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    draft.replace(path)


def shut_file(path: Path) -> None:
    """Take a regular file from the other users if it is this user's. Harmless when it is gone. Raises OSError."""
    with suppress(FileNotFoundError):
        if stat.S_ISREG(path.lstat().st_mode):
            _shut(path, 0o600)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file of this user or the folder's owner, without waiting. Raises OSError, for others as well."""
    trusted = (os.getuid(), path.parent.stat().st_uid)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO has no writer
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid in trusted:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}", str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))
