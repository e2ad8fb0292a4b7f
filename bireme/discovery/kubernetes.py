"""Workers' records in Kubernetes without etcd: a Service's EndpointSlices name the pods, which tell their own workers.

    engine -> folder of its launch -> the launch's health port -> launches of other pods -> their own processes

So each launch alone asks the API server and other pods, for all of its processes; a frontend without a server asks for
itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from bireme.discovery import run_folder
from bireme.discovery.directory import DirectoryStore
from bireme.discovery.pods import Pods
from bireme.discovery.record_page import ALL_PATH, PageClient, RecordPage
from bireme.discovery.records import WorkerRecord, open_record
from bireme.discovery.store import Refused, StoreError
from bireme.settings import DiscoveryConfig

AT = "BIREME_RECORDS"  # host:port of the launch's page of records, in its processes' environment
logger = logging.getLogger("bireme.discovery")


class RecordSource(Protocol):
    def page(self) -> RecordPage:
        """Raises StoreError."""

    def wait(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


def registered(config: DiscoveryConfig, key: bytes, run_folder: Path) -> DirectoryStore:
    """Return the store of one launch's workers."""
    folder = str(run_folder / "registered")
    return DirectoryStore(DiscoveryConfig(backend="directory", folder=folder, lease_s=config.lease_s), key)


class KubernetesStore:
    """RecordStore."""

    def __init__(
        self, config: DiscoveryConfig, key: bytes, source: RecordSource, own: DirectoryStore | None = None
    ) -> None:
        """`own`: where the launch finds what is held; None: there is no launch."""
        self._config, self._key, self._source, self._own = config, key, source, own
        self.refused: dict[str, Refused] = {}
        self.problem = ""
        self._last: tuple[RecordPage, dict[str, WorkerRecord]] = RecordPage(), {}
        self._told: set[bytes] = set()  # what has been complained about

    def read(self) -> dict[str, WorkerRecord]:
        page = self._source.page()
        if page.workers is None:
            raise StoreError(page.problem)
        self.problem = page.problem
        if page != self._last[0]:
            self._last = page, self._open(page.workers)
        return dict(self._last[1])

    def wait(self, timeout_s: float) -> None:
        self._source.wait(timeout_s)

    def hold(self, record: WorkerRecord) -> None:
        if self._own is None:
            raise StoreError("no launch tells other pods of this worker; serve with tools/serve.py")
        self._own.hold(record)

    def withdraw(self) -> None:
        if self._own is not None:
            self._own.withdraw()

    def close(self) -> None:
        self._source.close()

    def _open(self, blobs: tuple[msgspec.Raw, ...]) -> dict[str, WorkerRecord]:
        """Return those that are proven; the first of an id counts."""
        found: dict[str, WorkerRecord] = {}
        refused: dict[str, Refused] = {}
        told: set[bytes] = set()
        for raw in blobs:
            blob = bytes(raw)
            try:
                record, doubt = open_record(blob, self._key)
            except ValueError as error:
                told.add(blob)
                if blob not in self._told:
                    logger.warning("record_unreadable service=%s error=%s", self._config.service, error)
                continue
            if not doubt:
                found.setdefault(record.id, record)
                continue
            refused[record.id] = record, doubt
            told.add(blob)
            if blob not in self._told:
                logger.error("record_refused worker=%s reason=%s", record.id, doubt)
        self.refused, self._told = refused, told
        return found


def open_store(config: DiscoveryConfig, key: bytes, environment: Mapping[str, str] = os.environ) -> KubernetesStore:
    """Return that of a process: of a launch, whose page it reads, or of none. Raises ConfigError."""
    if at := environment.get(AT):
        address = urlsplit(f"http://{at}")
        page = PageClient(address.hostname or "", address.port or 0, ALL_PATH)
        return KubernetesStore(config, key, page, registered(config, key, run_folder.locate()))
    pods = Pods(config)
    pods.start()
    return KubernetesStore(config, key, pods)
