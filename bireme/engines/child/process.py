"""The life of an engine process: IO thread first, then load and warm-up, hello, serve, drain, stop.

The main thread loads and then waits for SIGTERM or SIGINT. While it loads, both end the process at once: a native call
that takes minutes would hold up a Python handler, and no request is open.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bireme.config import ROUTED_STAGES, KvEventsConfig, Recipe, WorkerEntry, stage_of, worker_id
from bireme.discovery import run_folder
from bireme.discovery.records import own_address
from bireme.discovery.revision import worker_revision
from bireme.discovery.view import own_record
from bireme.engines.base import Engine, EngineContext
from bireme.engines.child.presence import Presence
from bireme.engines.child.server import EngineServer
from bireme.engines.child.validate import Gate
from bireme.engines.config import check_engine_config, with_events
from bireme.engines.stub.environment import given_recipe, gpu_neighbors, num_threads
from bireme.engines.stub.process_log import start_log
from bireme.errors import ConfigError, UnavailableError, to_message
from bireme.kv.transfer.base import KvTransfer
from bireme.kv.wire.step_records import StepRing
from bireme.messages import Capacity
from bireme.metrics import Registry, limits_of, use_buckets
from bireme.observability.otlp import engine_endpoint
from bireme.own_process import freeze_gc, give_back_memory, reuse_memory
from bireme.own_work import SUFFIX, OwnWork
from bireme.stop_signals import on_stop_signal
from bireme.text.tokenizer_files import text_revision

if TYPE_CHECKING:
    from bireme.engines.memory.client import WeightsHold
    from bireme.kv.publishing.publisher import EventPlane
    from bireme.multimodal.embedding_share import EmbeddingShare

logger = logging.getLogger("bireme.engine")
DRAIN_S = 1.0  # how long open requests may run on after SIGTERM
_RECORD_LOOK_S = 0.25
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h
_SWITCH_INTERVAL_S = 0.001  # a Python-heavy step must not hold up the IO thread for the default 5 ms


class EngineProcess:
    """Run once, on the main thread."""

    def __init__(
        self, worker: str, endpoint: str, life: int, create_engine: Callable[[str, EngineContext], Engine]
    ) -> None:
        self._worker, self._endpoint = worker, endpoint
        self._life = life
        self._metrics = Registry(worker)
        self._steps: StepRing | None = None  # where step records are asked for
        self._own_work = OwnWork.open(endpoint.removeprefix("ipc://") + SUFFIX)
        self._server = EngineServer(endpoint, life, self._metrics, self._own_work)
        self._create_engine = create_engine
        self._engine: Engine | None = None
        self._parts = contextlib.ExitStack()  # what ends with the process, the engine first
        self._has_ended = threading.Event()
        self._began_at = time.monotonic()

    def run(self) -> int:
        start_log(f"{self._worker} engine")
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks for stacks before it kills
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._server.start()
        try:
            gate = self._load()
        except Exception as error:
            return self._give_up(error)
        on_stop_signal(lambda number: self._has_ended.set())
        freeze_gc()  # collections need not look at the loaded objects
        give_back_memory()
        reuse_memory()
        assert self._engine is not None
        self._server.open(self._engine, gate)
        logger.info(
            "engine_ready life=%d load_s=%.2f context=%d",
            self._life, gate.capacity.load_s, gate.capacity.max_seq_len,
        )  # fmt: skip
        while not self._has_ended.wait(_RECORD_LOOK_S):
            self._presence.look()
        self._presence.close()
        self._drain()
        self._stop()
        self._free_weights()
        logger.info("engine_stopped life=%d", self._life)
        return 0

    def _load(self) -> Gate:
        folder = run_folder.locate()
        recipe, entry = given_recipe(self._worker)
        use_buckets(recipe.metrics.buckets)
        check_engine_config(entry)
        self._presence = presence = Presence(recipe, folder)
        self._parts.callback(presence.close)
        transfer = self._make_transfer(recipe, entry, folder)
        share = self._make_share(recipe, entry, folder)
        self._engine = self._create_engine(entry.engine, self._context(recipe, entry, transfer, share))
        self._parts.callback(self._engine.stop)
        capacity = self._engine.start(self._server.emit)
        if not capacity.load_s:
            capacity = msgspec.structs.replace(capacity, load_s=time.monotonic() - self._began_at)
        self._metrics.merge(limits_of(capacity, self._worker))
        key = run_folder.deployment_key(folder)
        plane = self._make_publisher(recipe, entry, key, capacity)
        if share is not None:  # its endpoint is known now that the engine has started it
            from bireme.multimodal.embedding_share import SUFFIX

            name, endpoint = self._worker + SUFFIX, share.endpoint
            presence.publish(own_record(recipe, name, self._life, folder, key, transfer_endpoint=endpoint))
        record = own_record(
            recipe,
            self._worker,
            self._life,
            folder,
            key,
            transfer_endpoint=transfer.endpoint if transfer else "",
            load_endpoint=plane.load_endpoint if plane else "",
            event_endpoint=plane.event_endpoint if plane else "",
            replay_endpoint=plane.replay_endpoint if plane else "",
            step_endpoint=plane.step_endpoint if plane else "",
            revision=worker_revision(recipe, stage_of(self._worker)),
            text_revision=text_revision(recipe),
            tokens_per_block=capacity.tokens_per_block,
            capacity=capacity,
            moves_own_kv=entry.kind.moves_own_kv or (transfer is not None and transfer.reaches_other_hosts),
        )
        presence.publish(record)
        return Gate(
            stage_of(self._worker),
            capacity,
            recipe.limits,
            key,
            entry.engine_config.cache_transceiver_config.backend is not None,
            entry.engine_config.max_input_len,
            worker=worker_id(self._worker, presence.server),
        )

    def _context(
        self, recipe: Recipe, entry: WorkerEntry, transfer: KvTransfer | None, share: EmbeddingShare | None
    ) -> EngineContext:
        is_routed = stage_of(self._worker) in ROUTED_STAGES
        has_events = recipe.publishes_events and is_routed
        self._steps = StepRing() if recipe.kv_events.step_records and is_routed else None
        return EngineContext(
            worker=self._worker,
            stage=stage_of(self._worker),
            model_path=_model_path(recipe, entry),
            config=with_events(entry.engine_config) if has_events else entry.engine_config,
            metrics=self._metrics,
            transfer=transfer,
            takes_kv=stage_of(self._worker) == "decode" and ("prefill" in recipe.workers or recipe.discovery.is_shared),
            num_threads=num_threads(recipe, entry),
            life=self._life,
            share=share,
            hosts_encoder=recipe.encoder_stage == stage_of(self._worker),
            media=recipe.media,
            max_n=recipe.limits.max_n,
            max_processor_ms=recipe.limits.max_processor_ms,
            own_work=self._own_work,
            hold_weights=self._hold_weights if recipe.memory_service.enabled else None,
            hold_wait_s=recipe.supervisor.start_timeout_s / 2,
            findings_path=run_folder.locate() / f"{self._worker}.findings",
            steps=self._steps,
            traces_endpoint=engine_endpoint(recipe, os.environ),
            gpu_neighbors=gpu_neighbors(recipe, self._worker),
        )

    def _hold_weights(self, weights: str) -> WeightsHold:
        from bireme.engines.memory.client import WeightsHold

        folder = run_folder.locate()
        hold = WeightsHold(folder, run_folder.deployment_key(folder), self._worker, weights)
        self._parts.callback(hold.close)
        return hold

    def _make_share(self, recipe: Recipe, entry: WorkerEntry, folder: Path) -> EmbeddingShare | None:
        from bireme.multimodal.model_config import picture_model

        if not entry.kind.needs_model or picture_model(recipe.model_path) is None:
            return None
        from bireme.kv.transfer import MAPPED, create_transfer
        from bireme.multimodal.embedding_share import SUFFIX, EmbeddingShare, ShareMetrics

        name = self._worker + SUFFIX
        moves = create_transfer(
            "NIXL" if recipe.embedding_backend == "NIXL" else MAPPED,
            run_dir=folder,
            worker=name,
            life=self._life,
            config=msgspec.structs.replace(entry.engine_config.cache_transceiver_config, max_tokens_in_buffer=None),
            metrics=ShareMetrics(self._metrics, name),
            find=self._presence.find,
            host=_host_for_others(recipe),
            deployment_key=run_folder.deployment_key(folder),
        )
        share = EmbeddingShare(moves, worker_id(name, self._presence.server), self._life)
        self._parts.callback(share.close)
        return share

    def _make_transfer(self, recipe: Recipe, entry: WorkerEntry, folder: Path) -> KvTransfer | None:
        transceiver = entry.engine_config.cache_transceiver_config
        if transceiver.backend is None or entry.kind.moves_own_kv:
            return None
        from bireme.kv.transfer import create_transfer

        transfer = create_transfer(
            transceiver.backend,
            run_dir=folder,
            worker=self._worker,
            life=self._life,
            config=transceiver,
            metrics=self._metrics,
            find=self._presence.find,
            host=_host_for_others(recipe),
            deployment_key=run_folder.deployment_key(folder),
        )
        self._parts.callback(transfer.close)
        return transfer

    def _make_publisher(self, recipe: Recipe, entry: WorkerEntry, key: bytes, capacity: Capacity) -> EventPlane | None:
        has_events, ring, num_ranks = recipe.publishes_events, self._steps, capacity.attention_dp_size
        is_asked = has_events or recipe.has_load_routing or ring is not None
        if stage_of(self._worker) not in ROUTED_STAGES or not is_asked:
            return None
        from bireme.kv.publishing.publisher import KvPublisher
        from bireme.kv.publishing.step_stream import StepStream

        assert self._engine is not None
        name = worker_id(self._worker, self._presence.server)
        plane = self._make_plane(recipe.kv_events, key, has_events)
        publisher = KvPublisher(
            self._engine,
            plane,
            worker=self._worker,
            life=self._life,
            tokens_per_block=capacity.tokens_per_block,
            num_ranks=num_ranks,
            deployment_key=key,
            metrics=self._metrics,
            has_events=has_events,
            replay_batches=recipe.kv_events.replay_batches,
            steps=StepStream(ring, name, self._life, num_ranks, self._metrics) if ring is not None else None,
        )
        self._parts.callback(publisher.close)
        publisher.start()
        self._server.on_change = publisher.wake
        return plane

    def _free_weights(self) -> None:
        """If the worker was put to sleep so."""
        folder = run_folder.locate()
        if not run_folder.must_free_weights(folder, self._worker):
            return
        from bireme.engines.memory.client import forget

        try:
            logger.info("weights_freed bytes=%d", forget(folder, run_folder.deployment_key(folder), self._worker))
        except UnavailableError as error:
            logger.info("weights_not_freed reason=%s", error)

    def _give_up(self, error: Exception) -> int:
        is_expected = isinstance(error, ConfigError)
        logger.error("engine_failed life=%d error=%s", self._life, to_message(error), exc_info=not is_expected)
        self._server.fail(to_message(error))
        self._stop()
        return EXIT_CONFIG if is_expected else 1

    def _drain(self) -> None:
        assert self._engine is not None
        self._engine.drain()
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            progress = self._engine.progress()
            if not progress.num_waiting + progress.num_running:
                return
            time.sleep(0.005)

    def _make_plane(self, config: KvEventsConfig, key: bytes, has_events: bool) -> EventPlane:
        has_steps = config.step_records
        if config.plane == "zmq":
            from bireme.kv.publishing.zmq_plane import ZmqPlane

            return ZmqPlane(self._endpoint, config.host, key, has_events=has_events, has_steps=has_steps)
        from bireme.kv.publishing.nats_plane import NatsPlane

        return NatsPlane(config, self._worker, self._life, key, has_events=has_events, has_steps=has_steps)

    def _stop(self) -> None:
        try:
            self._parts.close()  # a part that fails keeps none of the others
        except Exception:
            logger.exception("stop_failed life=%d", self._life)
        self._server.close()


def _host_for_others(recipe: Recipe) -> str:
    """ "": no other host reaches this one."""
    return own_address().rpartition(":")[0] if recipe.discovery.is_shared else ""


def _model_path(recipe: Recipe, entry: WorkerEntry) -> str:
    """The mocker needs its tokenizer's folder alone, if that."""
    if entry.kind.needs_model:
        return recipe.model_path
    try:
        return recipe.tokenizer_path
    except ConfigError:
        return ""
