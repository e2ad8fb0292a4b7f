"""Which workers serve a recipe now, as one process sees it.

    own server's workers     the recipe's, with their records where the run folder is within reach
    other servers' workers   the shared store's (recipe block `discovery`), less those refused by `admit`

So a server knows its own workers without a store, and while the store is down.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bireme.config import Recipe, worker_id
from bireme.discovery import live_settings, run_folder
from bireme.discovery.follower import Follower, OnChange, Records
from bireme.discovery.records import LaunchFacts, WorkerRecord, host_id, key_id, launch_id, other_wire, own_address
from bireme.discovery.store import RecordReader, RecordStore, shared_key
from bireme.errors import ConfigError, NotFoundError
from bireme.messages import VERSION
from bireme.metrics import Registry
from bireme.settings import DiscoveryConfig
from bireme.text.tokenizer_files import text_revision

_TEXT_STAGES = ("prefill", "decode", "multimodal_encoder", "embedding")
LOOK_S = 0.5
logger = logging.getLogger("bireme.discovery")


class OwnWorkers:
    """RecordReader of the recipe's workers on this server."""

    problem = ""

    def __init__(self, recipe: Recipe, folder: Path | None, facts: LaunchFacts | None = None) -> None:
        """`folder`: the run folder; None: out of reach, only names are known. `facts`: None: the environment's."""
        facts = facts or LaunchFacts.of()
        self._first_weight = facts.weight
        self._unknown = {
            name: WorkerRecord(
                worker=name,
                tokens_per_block=entry.engine_config.kv_cache_config.tokens_per_block,
                generation=facts.generation,
            )
            for stage, entry in recipe.workers.items()
            if stage in _TEXT_STAGES
            for name in recipe.replicas(stage)
        }
        self._folder = folder
        self._read: dict[str, tuple[int, WorkerRecord]] = {}  # name -> modification time (ns), record
        self._closing = threading.Event()

    def read(self) -> dict[str, WorkerRecord]:
        return {name: self._record(name) for name in self._unknown}

    def wait(self, timeout_s: float) -> None:
        self._closing.wait(LOOK_S if self._folder is not None else None)

    def close(self) -> None:
        self._closing.set()

    def _record(self, name: str) -> WorkerRecord:
        unknown = msgspec.structs.replace(self._unknown[name], weight=live_settings.weight(self._first_weight))
        if self._folder is None:
            return unknown
        try:
            changed = (self._folder / f"{name}.json").stat().st_mtime_ns
            if name not in self._read or self._read[name][0] != changed:
                self._read[name] = changed, run_folder.find(self._folder, name)
        except (OSError, NotFoundError):  # its engine starts, or is being started again: it may still get requests
            return unknown
        return self._read[name][1]


class WorkerView:
    """Who serves a recipe, until `stop`."""

    def __init__(
        self,
        recipe: Recipe,
        own: RecordReader | None,
        shared: RecordStore | None,
        server: str = "",
        launch: str = "",
        metrics: Registry | None = None,
        text_revision: str = "",
    ) -> None:
        """`server`, `launch`, `text_revision`: the own ones, as in its records."""
        self._text_revision = text_revision
        self._recipe, self._server, self._launch = recipe, server, launch
        lease_s = recipe.discovery.lease_s
        self._own = Follower(own, lease_s, self._merge) if own is not None else None
        self._metrics, self._store = metrics, shared
        self._shared = Follower(shared, lease_s, self._merge, self._count_stale) if shared is not None else None
        self._lock = threading.Lock()
        self._on_change: OnChange = lambda records: None
        self._view: Records | None = None
        self._refused: dict[str, str] = {}  # worker id -> why

    @property
    def is_current(self) -> bool:
        """False: the shared store can't be reached, the last view stands."""
        return self._shared is None or not self._shared.problem

    def watch(self, on_change: OnChange) -> None:
        """Call `on_change` with the whole view: before this returns, then on a thread after each change."""
        self._on_change = on_change
        if self._own is not None:
            self._own.read_now()
        self._merge({})
        for follower in filter(None, (self._own, self._shared)):
            follower.start()

    def stop(self) -> None:
        for follower in filter(None, (self._own, self._shared)):
            follower.stop()

    def report(self) -> dict[str, Any]:
        """Return readiness's part; {} without a store."""
        if self._shared is None:
            return {}
        with self._lock:
            others = [name for name in self._view or {} if "@" in name]
            return {
                "backend": self._recipe.discovery.backend,
                "current": self.is_current,
                "reason": self._shared.problem,
                "workers_elsewhere": len(others),
                "unregistered": [record.worker for record in self._registered().values() if not record.life],
                "refused": self._unproven() | self._refused,
            }

    def _unproven(self) -> dict[str, str]:
        refused = self._store.refused if self._store is not None else {}
        return {
            name: why for name, (record, why) in refused.items() if _may_concern(record, self._recipe, self._server)
        }

    def is_drained_elsewhere(self) -> bool:
        """Return whether the store has no own worker ready."""
        return not any(record.life and not record.is_draining for record in self._registered().values())

    def _registered(self) -> Records:
        """Return own workers as the store has them; life 0: it does not."""
        if self._own is None or self._shared is None:
            return {}
        found, names = self._shared.records, self._own.records
        ours = {name: found.get(worker_id(name, self._server)) for name in names}
        return {
            name: record if record is not None and record.launch == self._launch else WorkerRecord(worker=name)
            for name, record in ours.items()
        }

    def _count_stale(self, is_stale: bool) -> None:
        if self._metrics is not None:
            self._metrics.set("bireme_discovery_stale", is_stale, self._recipe.served_name)

    def _merge(self, _: Records) -> None:
        """On the thread of either follower."""
        with self._lock:
            own = dict(self._own.records) if self._own is not None else {}
            others, refused = admit(
                self._shared.records if self._shared is not None else {},
                self._recipe,
                own,
                self._server,
                self._launch,
                self._text_revision,
            )
            for name, reason in refused.items():
                if self._refused.get(name) != reason:
                    logger.error("worker_refused worker=%s reason=%s", name, reason)
            self._refused = refused
            view = own | others
            if view != self._view:
                self._view = view
                self._on_change(view)


def admit(
    records: Records,
    recipe: Recipe,
    own: Mapping[str, WorkerRecord],
    server: str = "",
    launch: str = "",
    text_revision: str = "",
) -> tuple[dict[str, WorkerRecord], dict[str, str]]:
    """Return others' workers that may serve a recipe, and why others may not, by id.

    They must equal the own ones, else the first by its id. `text_revision`: of the own recipe.
    """
    known = [record for record in own.values() if record.life]
    keys = [record.key_id for record in known]
    blocks = {record.stage: record.tokens_per_block for record in known if record.tokens_per_block}
    admitted: dict[str, WorkerRecord] = {}
    refused: dict[str, str] = {}
    for name, record in _others(records, recipe, server, launch):
        reason = _stranger(name, record, recipe, server, text_revision)
        if not reason:
            keys = keys or [record.key_id]
            block = blocks.setdefault(record.stage, record.tokens_per_block)
            reason = _mismatch(record, keys[0], block)
        if reason:
            refused[name] = reason
        else:
            admitted[name] = record
    return admitted, refused


def _others(records: Records, recipe: Recipe, server: str, launch: str) -> list[tuple[str, WorkerRecord]]:
    """Return the records that concern a recipe and are not its launch's own, in order."""
    return [
        (name, record)
        for name, record in sorted(records.items())
        if _may_concern(record, recipe) and not (record.server == server and launch in ("", record.launch))
    ]


def _stranger(name: str, record: WorkerRecord, recipe: Recipe, server: str, text_revision: str) -> str:
    """Return why nothing of a record counts; empty: it does."""
    if record.server == server:
        return f"another launch ({record.launch}) has registered this server's address"
    if name != record.id:
        return f"its record is that of {record.id}"
    return other_wire(record) or _other_model(record, recipe, text_revision)


def _other_model(record: WorkerRecord, recipe: Recipe, text_revision: str) -> str:
    """Return why prompts made here are none for a worker; "": they are.

    Where both sides know what makes prompts, the model's name says nothing: another revision lies in another folder.
    """
    model = _model_name(recipe)
    if record.text_revision and text_revision:
        if record.text_revision == text_revision:
            return "" if record.revision or record.model == model else _other_name(record, model)
        return (
            f"{record.model} makes other prompts than {model} here (text revision {record.text_revision}, here"
            f" {text_revision}): tokenizer, chat template or their settings differ; send to it by a frontend of its own"
            " launch, or give both the same"
        )
    return "" if record.model == model else _other_name(record, model)


def _mismatch(record: WorkerRecord, key_id: str, tokens_per_block: int) -> str:
    """Return why a worker can't serve; empty: it can."""
    if record.key_id != key_id:
        return "it has another deployment key; give all servers one BIREME_KEY"
    if record.tokens_per_block != tokens_per_block:
        return f"tokens_per_block: {record.tokens_per_block}; {record.stage} workers here have {tokens_per_block}"
    return ""


def _other_name(record: WorkerRecord, model: str) -> str:
    return f"it serves {record.model} as {record.served_model_name}, this recipe {model}"


def _may_concern(record: WorkerRecord, recipe: Recipe, but_server: str = "") -> bool:
    is_own = bool(but_server) and record.server == but_server
    return record.served_model_name == recipe.served_name and record.stage in _TEXT_STAGES and not is_own


def discover(
    recipe: Recipe,
    server: str | None,
    folder: Path | None = None,
    metrics: Registry | None = None,
    shared: RecordStore | None = None,
    facts: LaunchFacts | None = None,
) -> WorkerView:
    """Return a recipe's view. Raises ConfigError.

    `server`: the own tritonserver's gRPC address; None: there is none. `folder`: its run folder, if in reach.
    `shared`: the recipe's shared store; None: it is made. `facts`: as `OwnWorkers` has them.
    """
    if shared is None and recipe.discovery.is_shared:
        shared = create_store(recipe.discovery)
    if server is None and shared is None:
        raise ConfigError(f"{recipe.name}: no server's address, and discovery.backend is static; give one of them")
    own = OwnWorkers(recipe, folder, facts) if server is not None else None
    texts = text_revision(recipe) if shared is not None else ""
    return WorkerView(recipe, own, shared, server or "", launch_id(folder) if folder else "", metrics, texts)


def create_store(config: DiscoveryConfig) -> RecordStore:
    """Return a shared store, unconnected. Raises ConfigError."""
    key = shared_key(config)
    if config.backend == "directory":
        from bireme.discovery.directory import DirectoryStore

        return DirectoryStore(config, key)
    if config.backend == "etcd":
        from bireme.discovery.etcd import EtcdStore

        return EtcdStore(config, key)
    if config.backend == "kubernetes":
        from bireme.discovery.kubernetes import open_store

        return open_store(config, key)
    raise ConfigError("discovery.backend: static has nothing that servers share; choose directory or etcd")


def own_record(recipe: Recipe, worker: str, life: int, folder: Path, key: bytes, **facts: Any) -> WorkerRecord:
    record = WorkerRecord(
        worker=worker,
        life=life,
        pid=os.getpid(),
        server=own_address() if recipe.discovery.is_shared else "",
        launch=launch_id(folder),
        host=host_id(),
        served_model_name=recipe.served_name,
        model=_model_name(recipe),
        key_id=key_id(key),
        generation=LaunchFacts.of().generation,
        wire=VERSION,
    )
    return msgspec.structs.replace(record, **facts)


def _model_name(recipe: Recipe) -> str:
    """The last part: folders differ from host to host."""
    return Path(recipe.model.rstrip("/")).name
