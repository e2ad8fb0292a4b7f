"""Keeps an engine process's records in a shared store, on a thread: its life is the lease.

The engine never waits for the store; what can't be written is tried again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from bireme.discovery.records import WorkerRecord
from bireme.discovery.store import NameTakenError, RecordStore, StoreError
from bireme.errors import drop_frames

_RETRY_S = 1.0
_STOP_S = 1.0
_LOG_EVERY_S = 30.0
logger = logging.getLogger("bireme.discovery")


class Registration:
    """`set` at any time, `stop` once."""

    def __init__(self, store: RecordStore, lease_s: float) -> None:
        self._store, self._interval_s = store, lease_s / 3
        self._records: dict[str, WorkerRecord] = {}
        self._lock = threading.Lock()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._logged = ("", 0.0)
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)
        self._thread.start()

    def set(self, record: WorkerRecord) -> None:
        """Hold this record, in place of the one of its id."""
        with self._lock:
            self._records[record.id] = record
        self._wake.set()

    @property
    def problem(self) -> str:
        """Why the last write failed; empty: it did not."""
        return self._logged[0]

    def stop(self) -> None:
        """Withdraw the records if the store answers in time; else their leases end."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            with self._lock:
                records = list(self._records.values())
            results = [self._hold(record) for record in records]
            self._wake.wait(self._interval_s if all(results) else min(_RETRY_S, self._interval_s))
        with contextlib.suppress(StoreError):
            self._store.withdraw()
        self._store.close()

    def _hold(self, record: WorkerRecord) -> bool:
        try:
            self._store.hold(record)
        except StoreError as error:
            level = logging.ERROR if isinstance(error, NameTakenError) else logging.WARNING
            self._log(level, record.id, str(error))
            drop_frames(error)
            return False
        except Exception:
            logger.exception("registration_failed worker=%s", record.id)
            return False
        if self._logged[0]:
            logger.info("worker_registered worker=%s", record.id)
            self._logged = ("", 0.0)
        return True

    def _log(self, level: int, worker: str, reason: str) -> None:
        text, logged_at = self._logged
        if reason != text or time.monotonic() - logged_at > _LOG_EVERY_S:
            logger.log(level, "worker_not_registered worker=%s reason=%s", worker, reason)
            self._logged = (reason, time.monotonic())
