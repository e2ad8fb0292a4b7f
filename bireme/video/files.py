"""Results on disk: a folder of files with random names, removed when they are old or take too much room.

The name gives the right to read the file (128 random bits), so URLs need no key. Several processes may share a folder:
each file is written under another name first, and its age is that of the file system.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from bireme import private_files
from bireme.config import Recipe
from bireme.errors import NotFoundError, ResourceExhaustedError, UnavailableError
from bireme.video.wire import MEDIA_TYPES

logger = logging.getLogger("bireme.video")
SUBFOLDER = "files"
_SUFFIXES = {"jpeg": "jpg"}
_NAME = re.compile(r"file-[0-9a-f]{32}\.(mp4|gif|png|jpg|webp|raw)")
_STALE_DRAFT_S = 3600.0
_PROBE = bytes(4096)  # what a full disk has no room for
_TYPES = {_SUFFIXES.get(kind, kind): text for kind, text in MEDIA_TYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str  # also its id
    path: Path
    num_bytes: int
    expires_at: float  # time.time()

    @property
    def media_type(self) -> str:
        return _TYPES.get(self.name.rpartition(".")[2], "application/octet-stream")


class FileStore:
    """Thread-safe; every method may block on the disk."""

    def __init__(self, folder: Path, expiry_s: float, max_bytes: int) -> None:
        """The folder is made by the first that is written."""
        self._folder, self._expiry_s, self._max_bytes = folder, expiry_s, max_bytes

    def check(self) -> None:
        """Write something of no consequence. Raises UnavailableError when the folder can't be written."""
        probe = self._folder / f".probe-{secrets.token_hex(4)}"
        try:
            private_files.make_folder(self._folder)
            try:
                probe.write_bytes(_PROBE)
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise UnavailableError(f"the folder of videos can't be written ({error.strerror})") from error

    def put(self, data: bytes, output_format: str) -> StoredFile:
        """Keep a file; older ones make room. Raises ResourceExhaustedError, UnavailableError."""
        if len(data) > self._max_bytes:
            raise ResourceExhaustedError(f"a result of {len(data)} bytes; video.max_folder_bytes is {self._max_bytes}")
        name = f"file-{secrets.token_hex(16)}.{_SUFFIXES.get(output_format, output_format)}"
        draft = self._folder / f".{name}"
        try:
            private_files.make_folder(self._folder)  # somebody may have made room
            self.sweep(self._max_bytes - len(data))
            draft.write_bytes(data)
            draft.rename(self._folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise UnavailableError(f"the result can't be kept ({error.strerror}); try again") from error
        return self._describe(self._folder / name)

    def find(self, name: str) -> StoredFile:
        """Raises NotFoundError for an unknown or removed name."""
        if _NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                file = self._describe(self._folder / name)
                if file.expires_at > time.time():
                    return file
        raise NotFoundError("no such file; results are removed when they are old")

    def remove(self, name: str) -> None:
        if _NAME.fullmatch(name):
            (self._folder / name).unlink(missing_ok=True)

    def sweep(self, max_bytes: int | None = None) -> int:
        """Remove what has expired, and the oldest files above the limit; return the bytes that are left."""
        limit = self._max_bytes if max_bytes is None else max_bytes
        files, now = sorted(self._files(), key=lambda file: file.expires_at), time.time()
        left = sum(file.num_bytes for file in files)
        for file in files:
            if file.expires_at > now and left <= limit:
                break
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:  # another user's, in a folder of several
                logger.warning("video_file_not_removed name=%s error=%s", file.name, error)
                continue
            left -= file.num_bytes
            reason = "expired" if file.expires_at <= now else "room"
            logger.info("video_file_removed bytes=%d reason=%s", file.num_bytes, reason)
        self._sweep_drafts(now)
        return left

    def _files(self) -> list[StoredFile]:
        found = []
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):  # removed meanwhile
                    found.append(self._describe(path))
        return found

    def _sweep_drafts(self, now: float) -> None:
        """Remove the half-written files of killed processes."""
        for path in self._folder.glob(".file-*"):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > _STALE_DRAFT_S:
                    path.unlink()

    def _describe(self, path: Path) -> StoredFile:
        status = path.stat()
        return StoredFile(path.name, path, status.st_size, status.st_mtime + self._expiry_s)


def video_folder(recipe: Recipe) -> Path:
    """Return where a recipe's results and jobs lie."""
    if recipe.video.folder:
        return Path(recipe.folder, recipe.video.folder)  # an absolute one stays itself
    base = os.environ.get("BIREME_STATE_DIR") or Path.home() / ".local" / "state" / "bireme"
    return Path(base) / recipe.name / "video"


def open_files(recipe: Recipe) -> FileStore:
    config = recipe.video
    return FileStore(video_folder(recipe) / SUBFOLDER, config.expiry_s, config.max_folder_bytes)
