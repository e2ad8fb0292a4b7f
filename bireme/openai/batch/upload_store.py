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
from bireme.errors import UnavailableError
from bireme.openai.database import Database, DatabaseError, columns_of
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
CREATE TABLE IF NOT EXISTS parts (
    name TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    made_at INTEGER NOT NULL
);
"""
_TAKEN = """
SELECT COUNT(*) AS count, COALESCE(SUM(bytes), 0) AS bytes FROM (
    SELECT bytes FROM files WHERE tenant = ?1 AND purpose = 'batch'
    UNION ALL SELECT bytes FROM parts WHERE tenant = ?1 AND name != ?2
)"""  # by a key's files and its uploads under way, but for one of these
_ABANDONED_S = 3600.0  # a part of an upload that nobody has written to for so long


class UploadedFile(msgspec.Struct, frozen=True):
    id: str
    tenant: str  # name of the key; "" where no keys are asked for
    purpose: str
    filename: str  # as it was sent; names nothing here
    bytes: int
    created_at: int
    expires_at: int

    def shown(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "tenant"}
        return {"object": "file", **fields, "status": "processed", "status_details": None}


_COLUMNS = columns_of(UploadedFile)


class UploadStore:
    def __init__(self, folder: Path, config: FilesConfig) -> None:
        self._config, self._folder = config, folder / "content"
        self.database = Database(folder / FILE, _SCHEMA, "files", beside=[self._folder])  # which only its rows explain
        try:
            private_files.make_folder(self._folder)
        except OSError as error:
            self.database.close()
            raise DatabaseError(f"the folder of files can't be made ({error.strerror})") from error

    def new_part(self) -> Path:
        return self._folder / f"{secrets.token_hex(16)}.part"

    def path(self, file: UploadedFile) -> Path:
        return self._folder / file.id

    def set_aside(self, part: Path, tenant: str, size: int) -> None:
        """Count an upload of so many bytes as one of the key's files, from now until `add` or `give_up`.

        Raises HttpError 400 when the files and uploads of the key would be too many or too large; the upload counts
        as before then.
        """
        limits = self._config
        has_room = self.database.write(
            f"INSERT INTO parts SELECT ?2, ?1, ?3, ?4 FROM ({_TAKEN}) WHERE count < ?5 AND bytes + ?3 <= ?6"
            " ON CONFLICT (name) DO UPDATE SET bytes = ?3",
            tenant, part.name, size, int(time.time()), limits.max_files, limits.max_bytes,
        )  # fmt: skip
        if has_room:
            return
        count, total = self.database.read(_TAKEN, tenant, part.name)[0]
        if count >= limits.max_files:
            raise HttpError(400, f"{count} files of this key are kept or on their way, its limit "
                            "(frontend.files.max_files); delete some", code="quota_exceeded")  # fmt: skip
        raise HttpError(400, f"{total} bytes of this key are kept or on their way, and {size} more exceed its limit "
                        f"{limits.max_bytes} (frontend.files.max_bytes); delete some files", code="quota_exceeded",
                        )  # fmt: skip

    def give_up(self, part: Path) -> None:
        """Forget an upload. Harmless after `add`."""
        self.database.write("DELETE FROM parts WHERE name = ?", part.name)

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
        self.database.write_together(
            (f"INSERT OR REPLACE INTO files ({_COLUMNS}) VALUES ({marks})", *values),
            ("DELETE FROM parts WHERE name = ?", part.name),
        )
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
        self._remove_lost(time.time() - _ABANDONED_S)
        return len(old)

    def _remove_lost(self, limit: float) -> None:
        """Remove content without a row, and rows of parts without content, that are older than `limit`."""
        known = {row["id"] for row in self.database.read("SELECT id FROM files")}
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if path.name not in known and path.stat().st_mtime < limit:
                    path.unlink()
        for row in self.database.read("SELECT name FROM parts WHERE made_at < ?", int(limit)):
            if not (self._folder / row["name"]).exists():
                self.database.write("DELETE FROM parts WHERE name = ?", row["name"])

    def close(self) -> None:
        self.database.close()

    def _rows(self, condition: str, *values: Any) -> list[UploadedFile]:
        return self.database.select(UploadedFile, f"files {condition}", *values)
