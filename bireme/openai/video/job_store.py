"""Jobs of /v1/videos in SQLite, beside their results: they outlive the frontend, and several frontends may share them.

An unfinished job whose process is gone has failed; any reader marks it so. Every method may block on the disk; all are
thread-safe.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from bireme.errors import NotFoundError, UnavailableError
from bireme.openai.database import DatabaseError, SharedStore, structs
from bireme.video.files import FileStore

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
CREATE INDEX IF NOT EXISTS jobs_by_age ON jobs (tenant, created_at, number);
"""
_OPEN = ("queued", "in_progress")


class Job(msgspec.Struct, frozen=True):
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

    @property
    def position(self) -> tuple[int, int, str]:
        """Orders the jobs of all stores by age."""
        return self.created_at, self.number, self.id


class JobStore(SharedStore):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE, _SCHEMA, "jobs")
        try:
            self.fail_orphans()
        except DatabaseError:
            self.close()
            raise

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
        if job.status in _OPEN and not self._lives.has(job.process):
            self.fail(job.id, "server_error", _ORPHANED)
            return self.find(job_id, tenant)
        return job

    def page(self, tenant: str, limit: int, after: Job | None, is_ascending: bool) -> list[Job]:
        """Return jobs in the order of their positions. `after` may be another store's."""
        order, sign = ("ASC", ">") if is_ascending else ("DESC", "<")
        start = after.position if after is not None else (0 if is_ascending else 2**62, 0, "")
        return self._read(
            f"SELECT * FROM jobs WHERE tenant = ? AND (created_at, number, id) {sign} (?, ?, ?)"
            f" ORDER BY created_at {order}, number {order} LIMIT ?",
            tenant, *start, limit,
        )  # fmt: skip

    def report(self, job_id: str, status: str, progress: int) -> bool:
        """Note a job's progress; false: it has been deleted, or has ended, which a late report must not undo."""
        return self._write(
            "UPDATE jobs SET status = ?, progress = ? WHERE id = ? AND completed_at IS NULL", status, progress, job_id
        )

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
        rows = self.database.read("SELECT status, COUNT(*) FROM jobs GROUP BY status")
        return dict.fromkeys((*_OPEN, "completed", "failed"), 0) | {row[0]: row[1] for row in rows}

    def fail_orphans(self) -> int:
        """Fail the jobs of processes that are gone; return how many."""
        rows = self._read("SELECT * FROM jobs WHERE status IN ('queued', 'in_progress')")
        orphans = [job for job in rows if not self._lives.has(job.process)]
        for job in orphans:
            self.fail(job.id, "server_error", _ORPHANED)
        self._lives.sweep()
        return len(orphans)

    def _read(self, query: str, *values: Any) -> list[Job]:
        return structs(Job, self.database.read(query, *values))

    def _write(self, query: str, *values: Any) -> bool:
        """Return whether a row has changed. Raises UnavailableError."""
        return self.database.write(query, *values) > 0


class FilesAndJobs:
    def __init__(self, folder: Path, files: FileStore) -> None:
        self.files = files
        self._check_files()
        self.jobs = JobStore(folder)
        self.databases = (self.jobs.database,)

    def check(self) -> None:
        self._check_files()
        self.jobs.database.check()

    def close(self) -> None:
        self.jobs.close()

    def _check_files(self) -> None:
        try:
            self.files.check()
        except UnavailableError as error:
            raise DatabaseError(str(error)) from error
