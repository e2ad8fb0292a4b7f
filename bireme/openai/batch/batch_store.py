"""Batches in SQLite, and the answers to their lines until these are put into files.

An unfinished batch belongs to a process, which runs it; when that is gone, another takes it and goes on: a line has one
row once it is answered, and none before. Every method may block on the disk; all are thread-safe.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from bireme.openai.batch.upload_store import FILE
from bireme.openai.database import SharedStore, columns_of, structs

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    status TEXT NOT NULL,
    process TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    input_file_id TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    details BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_tenant ON batches (tenant, number);
CREATE INDEX IF NOT EXISTS unfinished_batches ON batches (process) WHERE process IS NOT NULL;
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL,
    number INTEGER NOT NULL,
    is_ok INTEGER NOT NULL,
    size INTEGER NOT NULL,
    line BLOB NOT NULL,
    PRIMARY KEY (batch, number)
);
CREATE INDEX IF NOT EXISTS lines_by_outcome ON lines (batch, is_ok, size);
"""
_PAGE = 64  # lines read at once
_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.decode


class StoredBatch(msgspec.Struct, frozen=True):
    id: str
    tenant: str  # name of the key; "" where no keys are asked for
    status: str
    process: str | None  # that runs it; None: it has ended
    created_at: int
    expires_at: int
    input_file_id: str
    endpoint: str
    details: bytes  # JSON: all else that OpenAI's object has

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = _decode(self.details)
        return fields


class AnswerCounts(msgspec.Struct, frozen=True):
    """Of a batch's answered lines."""

    completed: int
    failed: int
    num_bytes: int


_COLUMNS = columns_of(StoredBatch)


class BatchStore(SharedStore):
    """Unfinished batches are left to others at its end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE, _SCHEMA, "batches")

    def add(self, batch: StoredBatch, max_unfinished: int) -> StoredBatch | None:
        """Keep a new batch; it is this process's. None: so many of the key have not ended. Raises UnavailableError."""
        own = msgspec.structs.replace(batch, process=self.process)
        marks = ", ".join("?" * len(own.__struct_fields__))
        is_kept = self.database.write(
            f"INSERT INTO batches ({_COLUMNS}) SELECT {marks}"
            " WHERE (SELECT COUNT(*) FROM batches WHERE process IS NOT NULL AND tenant = ?) < ?",
            *msgspec.structs.astuple(own), own.tenant, max_unfinished,
        )  # fmt: skip
        return own if is_kept else None

    def find(self, batch_id: str, tenant: str) -> StoredBatch | None:
        """None also for another key's."""
        return next(iter(self._rows("WHERE id = ? AND tenant = ?", batch_id, tenant)), None)

    def page(self, tenant: str, after: str | None, limit: int) -> tuple[list[StoredBatch], bool] | None:
        """Return batches, the newest first, and whether there are more; None: no batch `after`."""
        start = 2**62
        if after is not None:
            found = self.database.read("SELECT number FROM batches WHERE id = ? AND tenant = ?", after, tenant)
            if not found:
                return None
            start = found[0]["number"]
        rows = self._rows("WHERE tenant = ? AND number < ? ORDER BY number DESC LIMIT ?", tenant, start, limit + 1)
        return rows[:limit], len(rows) > limit

    def move(self, batch_id: str, before: tuple[str, ...], status: str, **fields: Any) -> bool:
        """Change the status from one of `before`, and these fields with it; false: it is another by now."""
        rows = self._rows("WHERE id = ?", batch_id)
        if not rows or rows[0].status not in before:
            return False
        row = rows[0]
        changed = self.database.write(
            "UPDATE batches SET status = ?, process = ?, details = ? WHERE id = ? AND status = ? AND process IS ?",
            status, row.process if status in UNFINISHED else None, _encode(row.fields | fields), batch_id, row.status,
            row.process,
        )  # fmt: skip
        return changed > 0

    def status(self, batch_id: str) -> str:
        """Return the status now; "" of one that is not there."""
        rows = self.database.read("SELECT status FROM batches WHERE id = ?", batch_id)
        return rows[0]["status"] if rows else ""

    def own_cancelled(self) -> list[str]:
        query = "SELECT id FROM batches WHERE process = ? AND status = 'cancelling'"
        return [row["id"] for row in self.database.read(query, self.process)]

    def take_orphans(self) -> list[StoredBatch]:
        """Return unfinished batches whose process is gone; on an error none, else all are this process's now."""
        if not (gone := self.gone("batches")):
            return []
        taken = self.database.change(
            "UPDATE batches SET process = ? WHERE process IN (SELECT value FROM json_each(?))"
            f" RETURNING number, {_COLUMNS}",
            self.process, _encode(gone).decode(),
        )  # fmt: skip
        return structs(StoredBatch, sorted(taken, key=lambda row: row["number"]))

    def answer(self, batch_id: str, number: int, is_ok: bool, line: bytes) -> None:
        """Keep the answer to a line, unless it has one. Raises UnavailableError."""
        self.database.write(
            "INSERT OR IGNORE INTO lines (batch, number, is_ok, size, line) VALUES (?, ?, ?, ?, ?)",
            batch_id, number, is_ok, len(line), line,
        )  # fmt: skip

    def answered(self, batch_id: str) -> set[int]:
        return {row["number"] for row in self.database.read("SELECT number FROM lines WHERE batch = ?", batch_id)}

    def counts(self, batch_id: str) -> AnswerCounts:
        query = "SELECT is_ok, COUNT(*), SUM(size) FROM lines WHERE batch = ? GROUP BY is_ok"
        found = {bool(row[0]): (row[1], row[2]) for row in self.database.read(query, batch_id)}
        (completed, good), (failed, bad) = found.get(True, (0, 0)), found.get(False, (0, 0))
        return AnswerCounts(completed, failed, good + bad)

    def answers_after(self, batch_id: str, number: int) -> list[tuple[int, bool, bytes]]:
        """Return some answers (line's number, whether it went well, line of a file) in the order of the input."""
        rows = self.database.read(
            "SELECT number, is_ok, line FROM lines WHERE batch = ? AND number > ? ORDER BY number LIMIT ?",
            batch_id, number, _PAGE,
        )  # fmt: skip
        return [(row["number"], bool(row["is_ok"]), row["line"]) for row in rows]

    def forget_answers(self, batch_id: str) -> None:
        self.database.write("DELETE FROM lines WHERE batch = ?", batch_id)
        self.database.change("PRAGMA incremental_vacuum")

    def used_files(self) -> frozenset[str]:
        query = "SELECT DISTINCT input_file_id FROM batches WHERE process IS NOT NULL"
        return frozenset(row["input_file_id"] for row in self.database.read(query))

    def sweep(self, max_age_s: int) -> int:
        """Remove ended batches that are too old, and what answers one has left; return how many."""
        query = "DELETE FROM batches WHERE process IS NULL AND created_at < ?"
        count = self.database.write(query, int(time.time()) - max_age_s)
        ended = "SELECT id FROM batches WHERE process IS NOT NULL"
        self.database.write(f"DELETE FROM lines WHERE batch NOT IN ({ended})")
        self._lives.sweep()
        return count

    def _rows(self, condition: str, *values: Any) -> list[StoredBatch]:
        return self.database.select(StoredBatch, f"batches {condition}", *values)
