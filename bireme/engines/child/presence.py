"""How others find this engine process: its records in the run folder and in the store that several servers share.

Also how it finds those whose KV or embeddings it is to fetch. Nothing here is waited for: an engine serves its own
server's clients while the store is out of reach.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from bireme.config import Recipe, split_worker
from bireme.discovery import live_settings, run_folder
from bireme.discovery.follower import Follower
from bireme.discovery.records import LaunchFacts, WorkerRecord, own_address
from bireme.discovery.registration import Registration
from bireme.discovery.view import create_store
from bireme.errors import ConfigError, NotFoundError

logger = logging.getLogger("bireme.engine")


class Presence:
    """`look` several times a second; `close` before the engine takes no more requests."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        """Raises ConfigError for a shared discovery that this process can't be found in."""
        self._folder, config = folder, recipe.discovery
        self._first_weight = LaunchFacts.of().weight
        self.server = ""  # by which other servers' processes call this one
        self._records: dict[str, WorkerRecord] = {}
        self._told_leaving: dict[str, bool] = {}  # of each record
        self._registration: Registration | None = None
        self._peers: Follower | None = None
        if config.is_shared:
            self.server = own_address()
            if not self.server:
                raise ConfigError(
                    "discovery: this server's address is not known; serve with tools/serve.py, or set BIREME_ADVERTISE"
                    " to the host:port by which other servers reach its gRPC endpoint"
                )
            self._registration = Registration(create_store(config), config.lease_s)
            self._peers = Follower(create_store(config), config.lease_s)
            self._peers.start()

    def publish(self, record: WorkerRecord) -> None:
        is_leaving, record = run_folder.is_draining(self._folder), self._with_state(record)
        if self._registration is not None:
            # A launch that ends takes nothing new from others, while its own pipelines finish what they have.
            self._registration.set(msgspec.structs.replace(record, state="draining") if is_leaving else record)
        run_folder.publish(self._folder, record)
        self._records[record.worker], self._told_leaving[record.worker] = record, is_leaving

    def look(self) -> None:
        """Restore deleted records; tell whether it drains; take what an operator has changed."""
        live_settings.look(self._folder)
        for record in list(self._records.values()):
            try:
                is_leaving = run_folder.is_draining(self._folder)
                if self._with_state(record) != record or is_leaving != self._told_leaving[record.worker]:
                    self.publish(record)
                    told = self._records[record.worker]
                    state = "leaving" if is_leaving else told.state
                    if told.weight != record.weight:
                        logger.info("worker_weight worker=%s weight=%g", record.worker, told.weight)
                    else:
                        logger.info("worker_state worker=%s state=%s", record.worker, state)
                elif run_folder.restore(self._folder, record):
                    logger.warning("record_restored worker=%s folder=%s", record.worker, self._folder)
            except OSError as error:  # the next look tries again
                logger.warning("record_not_restored worker=%s error=%s", record.worker, error)

    def find(self, worker: str) -> WorkerRecord:
        """Raises NotFoundError."""
        name, server = split_worker(worker)
        if server in ("", self.server):
            return run_folder.find(self._folder, name)
        record = self._peers.records.get(worker) if self._peers is not None else None
        if record is None:
            raise NotFoundError(f"worker {worker} is not in discovery")
        return record

    def close(self) -> None:
        """Leave the shared store. The supervisor removes the run folder's records."""
        if self._registration is not None:
            self._registration.stop()
        if self._peers is not None:
            self._peers.stop()

    def _with_state(self, record: WorkerRecord) -> WorkerRecord:
        is_draining = run_folder.is_draining(self._folder, record.worker)
        weight = live_settings.weight(self._first_weight)
        return msgspec.structs.replace(record, state="draining" if is_draining else "ready", weight=weight)
