"""Jobs of /v1/videos in SQLite: they outlive the frontend, and several frontends may share them.

Each process holds a lock file for as long as it lives. An unfinished job whose process is gone has failed; any reader
marks it so. Every method may block on the disk; all are thread-safe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from bireme.errors import ConfigError, NotFoundError, UnavailableError

FILE = "jobs.sqlite"
_ORPHANED = "the frontend that ran this job has ended; create the job again"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    process TEXT NOT NULL,
    status TEXT NOT NULL,
    progress INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    completed_at INTEGER,
    model TEXT NOT NULL,
    prompt TEXT NOT NULL,
    details TEXT NOT NULL DEFAULT '{}',
    file TEXT,
    error_code TEXT,
    error_message TEXT
);
CREATE INDEX IF NOT EXISTS jobs_by_tenant ON jobs (tenant, number);
"""
_OPEN = ("queued", "in_progress")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    number: int
    id: str
    tenant: str  # name of the key that made it; "" where no keys are asked for
    process: str
    status: str  # queued, in_progress, completed, failed
    progress: int
    created_at: int
    completed_at: int | None
    model: str
    prompt: str
    details: str  # JSON
    file: str | None
    error_code: str | None
    error_message: str | None


class JobStore:
    """`close` at the end."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when the folder can't be used."""
        self.process = secrets.token_hex(8)
        self._processes = folder / "processes"
        self._lock = threading.Lock()
        try:
            self._processes.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._life = self._hold(self.process)
            self._database = sqlite3.connect(folder / FILE, timeout=10, check_same_thread=False, isolation_level=None)
            self._database.row_factory = sqlite3.Row
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"video.folder: {folder}: no database of jobs can be kept there ({error})") from error
        self.fail_orphans()

    def add(self, job_id: str, tenant: str, model: str, prompt: str, details: str) -> Job:
        self._write(
            "INSERT INTO jobs (id, tenant, process, status, created_at, model, prompt, details)"
            " VALUES (?, ?, ?, 'queued', ?, ?, ?, ?)",
            job_id, tenant, self.process, int(time.time()), model, prompt, details,
        )  # fmt: skip
        return self.find(job_id, tenant)

    def find(self, job_id: str, tenant: str) -> Job:
        """Raises NotFoundError, also for another key's job."""
        rows = self._read("SELECT * FROM jobs WHERE id = ? AND tenant = ?", job_id, tenant)
        if not rows:
            raise NotFoundError(f"video: {job_id[:80]} does not exist; it may have been deleted or have expired")
        job = rows[0]
        if job.status in _OPEN and not self._is_alive(job.process):
            self.fail(job.id, "server_error", _ORPHANED)
            return self.find(job_id, tenant)
        return job

    def page(self, tenant: str, limit: int, after: str | None, is_ascending: bool) -> tuple[list[Job], bool]:
        """Return jobs in the order in which they were made, and whether there are more. Raises NotFoundError."""
        order, sign = ("ASC", ">") if is_ascending else ("DESC", "<")
        start = self.find(after, tenant).number if after else (0 if is_ascending else 2**62)
        rows = self._read(
            f"SELECT * FROM jobs WHERE tenant = ? AND number {sign} ? ORDER BY number {order} LIMIT ?",
            tenant, start, limit + 1,
        )  # fmt: skip
        return rows[:limit], len(rows) > limit

    def report(self, job_id: str, status: str, progress: int) -> bool:
        """Note a job's progress; false: it has been deleted."""
        return self._write("UPDATE jobs SET status = ?, progress = ? WHERE id = ?", status, progress, job_id)

    def complete(self, job_id: str, details: str, file: str) -> bool:
        """False: it has been deleted."""
        return self._write(
            "UPDATE jobs SET status = 'completed', progress = 100, completed_at = ?, details = ?, file = ?"
            " WHERE id = ?",
            int(time.time()), details, file, job_id,
        )  # fmt: skip

    def fail(self, job_id: str, code: str, message: str) -> bool:
        return self._write(
            "UPDATE jobs SET status = 'failed', completed_at = ?, error_code = ?, error_message = ?"
            " WHERE id = ? AND status IN ('queued', 'in_progress')",
            int(time.time()), code, message, job_id,
        )  # fmt: skip

    def remove(self, job_id: str, tenant: str) -> Job:
        """Return what was removed. Raises NotFoundError."""
        job = self.find(job_id, tenant)
        self._write("DELETE FROM jobs WHERE id = ?", job.id)
        return job

    def expire(self, age_s: float, max_jobs: int) -> list[str]:
        """Remove old finished jobs, and the oldest of too many; return the files that they leave."""
        rows = self._read(
            "SELECT * FROM jobs WHERE completed_at IS NOT NULL AND (completed_at < ?"
            " OR number <= (SELECT MAX(number) FROM jobs) - ?)",
            int(time.time() - age_s), max_jobs,
        )  # fmt: skip
        for job in rows:
            self._write("DELETE FROM jobs WHERE id = ?", job.id)
        return [job.file for job in rows if job.file]

    def counts(self) -> dict[str, int]:
        with self._lock:
            rows = self._database.execute("SELECT status, COUNT(*) FROM jobs GROUP BY status").fetchall()
        return dict.fromkeys((*_OPEN, "completed", "failed"), 0) | {row[0]: row[1] for row in rows}

    def fail_orphans(self) -> int:
        """Fail the jobs of processes that are gone; return how many."""
        rows = self._read("SELECT * FROM jobs WHERE status IN ('queued', 'in_progress')")
        orphans = [job for job in rows if not self._is_alive(job.process)]
        for job in orphans:
            self.fail(job.id, "server_error", _ORPHANED)
        return len(orphans)

    def close(self) -> None:
        """Harmless when called again."""
        with self._lock:
            self._database.close()
            life, self._life = self._life, -1
        if life < 0:
            return
        os.close(life)
        (self._processes / self.process).unlink(missing_ok=True)

    def _hold(self, process: str) -> int:
        descriptor = os.open(self._processes / process, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def _is_alive(self, process: str) -> bool:
        """The kernel frees a lock with its process, whatever ended it."""
        if process == self.process:
            return True
        try:
            descriptor = os.open(self._processes / process, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            (self._processes / process).unlink()
        return False

    def _read(self, query: str, *values: Any) -> list[Job]:
        with self._lock:
            try:
                rows = self._database.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise UnavailableError(f"the database of jobs can't be read ({error}); try again") from error
        return [Job(**dict(row)) for row in rows]

    def _write(self, query: str, *values: Any) -> bool:
        """Return whether a row has changed. Raises UnavailableError."""
        with self._lock:
            try:
                return self._database.execute(query, values).rowcount > 0
            except sqlite3.Error as error:
                raise UnavailableError(f"the database of jobs can't be written ({error}); try again") from error
