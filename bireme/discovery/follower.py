"""Follows a store on a thread: the last view, what has changed, whether it is current.

The last view stands while the store can't be reached. Then workers that it lacks are kept for one more lease: a store
that came back empty must not end a deployment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from bireme.child_process import Backoff
from bireme.discovery.records import WorkerRecord
from bireme.discovery.store import RecordReader, StoreError
from bireme.errors import drop_frames

Records = Mapping[str, WorkerRecord]  # by worker id
OnChange = Callable[[Records], None]
WAIT_S = 1.5  # at most, from one look to the next: so long a store that stands still is not missed
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
logger = logging.getLogger("bireme.discovery")


class Follower:
    """`start` once, `stop` once.

    On its thread: `on_change` with the whole view after each change, `on_stale` after each look.
    """

    def __init__(
        self,
        store: RecordReader,
        lease_s: float,
        on_change: OnChange = lambda records: None,
        on_stale: Callable[[bool], None] = lambda is_stale: None,
    ) -> None:
        self._store, self._lease_s, self._on_change, self._on_stale = store, lease_s, on_change, on_stale
        self._stopping = threading.Event()
        self._records: Records = {}
        self._problem, self._failing_since = "not read yet", 0.0
        self._kept_until = 0.0
        self._missed: dict[str, float] = {}  # of those that are kept: since when a read has lacked them
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    @property
    def records(self) -> Records:
        return self._records

    @property
    def problem(self) -> str:
        """Why the view may be out of date; empty: it is current."""
        if not self._problem or not self._failing_since:
            return self._problem
        return f"{self._problem} (for {time.monotonic() - self._failing_since:.0f} s)"

    def read_now(self) -> None:
        """Read before `start`, on the caller's thread."""
        self._take(self._store.read())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._store.close()

    def _run(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._stopping.is_set():
            try:
                self._take(self._store.read())
                backoff.reset()
                self._store.wait(WAIT_S)
            except StoreError as error:
                self._note_failure(str(error))
                drop_frames(error)
                self._stopping.wait(backoff.next_s())
            except Exception as error:
                logger.exception("discovery_failed")
                self._note_failure(f"{type(error).__name__}: {error}")
                self._stopping.wait(_LONGEST_PAUSE_S)

    def _take(self, read: Records) -> None:
        now = time.monotonic()
        if problem := self._store.problem:
            self._note_failure(problem)
        else:
            self._note_success(now)
        missed = {name: self._missed.get(name, now) for name in self._records if name not in read}
        is_patient = now < self._kept_until
        kept = [name for name, since in missed.items() if is_patient and now < since + self._lease_s]
        self._missed = {name: missed[name] for name in kept}
        records = {name: self._records[name] for name in kept} | dict(read)
        if records != self._records:
            self._records = records
            self._on_change(records)

    def _note_success(self, now: float) -> None:
        if self._failing_since:
            logger.info("discovery_current_again after_s=%.1f", now - self._failing_since)
            self._kept_until = now + self._lease_s
        self._problem, self._failing_since = "", 0.0
        self._on_stale(False)

    def _note_failure(self, problem: str) -> None:
        if not self._failing_since:
            self._failing_since = time.monotonic()
            logger.warning("discovery_stale workers=%d reason=%s", len(self._records), problem)
        self._problem = problem
        self._on_stale(True)
