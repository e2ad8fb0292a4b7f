"""Records, a store in memory whose outages a test makes, and a wait for what threads do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bireme.discovery.records import WorkerRecord
from bireme.discovery.store import Refused, StoreError

KEY = b"k" * 32  # of the deployment


def record(worker: str = "decode", server: str = "b:8001", **fields: Any) -> WorkerRecord:
    """Return the record of a worker that serves the recipe of these tests."""
    known = {"launch": server, "life": 1, "served_model_name": "chat", "model": "tiny", "key_id": "k"}
    return WorkerRecord(worker=worker, server=server, **(known | {"tokens_per_block": 32} | fields))


def by_id(*records: WorkerRecord) -> dict[str, WorkerRecord]:
    return {one.id: one for one in records}


def odd_entry(path: Path, kind: str) -> None:
    """Make what may lie in a folder of records and is none."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.write_bytes(b'{"worker":"de\xffcode"}')


class MemoryStore:
    """RecordStore. `change` sets what it has, `fail` makes every call fail until the next change."""

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self.refused: dict[str, Refused] = {}
        self.problem = ""
        self.num_reads = 0
        self.held: list[WorkerRecord] = []
        self._changed = threading.Event()

    def change(self, *records: WorkerRecord) -> None:
        self.records, self.problem = by_id(*records), ""
        self._changed.set()

    def fail(self, problem: str) -> None:
        self.problem = problem
        self._changed.set()

    def read(self) -> dict[str, WorkerRecord]:
        self._check()
        self.num_reads += 1
        return dict(self.records)

    def wait(self, timeout_s: float) -> None:
        self._changed.wait(timeout_s)
        self._changed.clear()

    def hold(self, record: WorkerRecord) -> None:
        self._check()
        self.held.append(record)
        self.records[record.id] = record

    def withdraw(self) -> None:
        for one in self.held:
            self.records.pop(one.id, None)

    def close(self) -> None:
        self._changed.set()

    def _check(self) -> None:
        if self.problem:
            raise StoreError(self.problem)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.005)

    return wait
