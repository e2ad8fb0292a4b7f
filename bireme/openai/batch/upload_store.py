"""Uploaded files and results of batches: a row in SQLite each, and its content in a file that is named by its id.

Files are one key's alone. Every method may block on the disk; all are thread-safe.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from bireme import private_files
from bireme.config import FilesConfig
from bireme.errors import ConfigError, UnavailableError
from bireme.openai.database import Database
from bireme.openai.http.error_replies import HttpError

FILE = "files.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_tenant ON files (tenant, purpose, number);
"""
_ABANDONED_S = 3600.0  # a part of an upload that nobody has written to for so long


class UploadedFile(msgspec.Struct, frozen=True):
    """One row."""

    id: str
    tenant: str  # name of the key; "" where no keys are asked for
    purpose: str
    filename: str  # as it was sent; names nothing here
    bytes: int
    created_at: int
    expires_at: int

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's object of a file."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "tenant"}
        return {"object": "file", **fields, "status": "processed", "status_details": None}


_COLUMNS = ", ".join(UploadedFile.__struct_fields__)


class UploadStore:
    """`close` at the end."""

    def __init__(self, folder: Path, config: FilesConfig) -> None:
        """Raises ConfigError when the folder can't be used."""
        self._config, self._folder = config, folder / "content"
        try:
            private_files.make_folder(self._folder)
        except OSError as error:
            raise ConfigError(f"frontend.files.folder: {folder}: it can't be used ({error})") from error
        self.database = Database(folder / FILE, _SCHEMA, "frontend.files.folder", "files")

    def new_part(self) -> Path:
        """Return where content is written before it becomes a file."""
        return self._folder / f"{secrets.token_hex(16)}.part"

    def path(self, file: UploadedFile) -> Path:
        return self._folder / file.id

    def check_room(self, tenant: str, size: int) -> None:
        """Raises HttpError 400 when the key's files are too many, or too large with one more of this size."""
        query = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE tenant = ? AND purpose = 'batch'"
        count, total = self.database.read(query, tenant)[0]
        limits = self._config
        if count >= limits.max_files:
            raise HttpError(400, f"{count} files are kept for this key, its limit (frontend.files.max_files); "
                            "delete some", code="quota_exceeded")  # fmt: skip
        if total + size > limits.max_bytes:
            raise HttpError(400, f"{total} bytes are kept for this key, and {size} more exceed its limit "
                            f"{limits.max_bytes} (frontend.files.max_bytes); delete some files", code="quota_exceeded",
                            )  # fmt: skip

    def add(
        self, part: Path, tenant: str, purpose: str, filename: str, max_age_s: int | None = None, file_id: str = ""
    ) -> UploadedFile:
        """Make a file of a written part. The same `file_id` again replaces the file. Raises UnavailableError."""
        now = int(time.time())
        age_s = min(max_age_s or self._config.max_age_s, self._config.max_age_s)
        name = file_id or f"file-{secrets.token_hex(16)}"
        try:
            file = UploadedFile(name, tenant, purpose, filename, part.stat().st_size, now, now + age_s)
            part.rename(self.path(file))
        except OSError as error:
            raise UnavailableError(f"the file can't be kept ({error.strerror}); try again") from error
        values = msgspec.structs.astuple(file)
        marks = ", ".join("?" * len(values))
        self.database.write(f"INSERT OR REPLACE INTO files ({_COLUMNS}) VALUES ({marks})", *values)
        return file

    def find(self, file_id: str, tenant: str) -> UploadedFile | None:
        """None also for another key's, and for an expired one."""
        file = self.find_kept(file_id, tenant)
        return file if file is not None and file.expires_at > int(time.time()) else None

    def find_kept(self, file_id: str, tenant: str) -> UploadedFile | None:
        """Return an expired file as well, for a batch under way: `sweep` leaves it what it uses."""
        return next(iter(self._rows("WHERE id = ? AND tenant = ?", file_id, tenant)), None)

    def page(
        self, tenant: str, purpose: str | None, after: str | None, is_ascending: bool, limit: int
    ) -> tuple[list[UploadedFile], bool] | None:
        """Return files in the order in which they were made, and whether there are more; None: no file `after`."""
        order, sign = ("ASC", ">") if is_ascending else ("DESC", "<")
        start = 0 if is_ascending else 2**62
        if after is not None:
            found = self.database.read("SELECT number FROM files WHERE id = ? AND tenant = ?", after, tenant)
            if not found:
                return None
            start = found[0]["number"]
        rows = self._rows(
            f"WHERE tenant = ? AND (?2 IS NULL OR purpose = ?2) AND expires_at > ? AND number {sign} ?"
            f" ORDER BY number {order} LIMIT ?",
            tenant, purpose, int(time.time()), start, limit + 1,
        )  # fmt: skip
        return rows[:limit], len(rows) > limit

    def remove(self, file: UploadedFile) -> None:
        self.database.write("DELETE FROM files WHERE id = ?", file.id)
        with contextlib.suppress(OSError):
            self.path(file).unlink()

    def sweep(self, used: frozenset[str]) -> int:
        """Remove what has expired, but for what is used, and what no row knows; return how many."""
        old = [file for file in self._rows("WHERE expires_at <= ?", int(time.time())) if file.id not in used]
        for file in old:
            self.remove(file)
        known = {row["id"] for row in self.database.read("SELECT id FROM files")}
        limit = time.time() - _ABANDONED_S
        lost = [path for path in self._folder.iterdir() if path.name not in known]
        for path in lost:
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < limit:
                    path.unlink()
        return len(old)

    def close(self) -> None:
        """Harmless when called again."""
        self.database.close()

    def _rows(self, condition: str, *values: Any) -> list[UploadedFile]:
        rows = self.database.read(f"SELECT {_COLUMNS} FROM files {condition}", *values)
        return [UploadedFile(**dict(row)) for row in rows]
