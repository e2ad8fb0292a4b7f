"""One process's part of the live state, from what its routers, views of workers and counters know anyway.

Nothing is asked of any engine. Only which way requests go is counted for it, while somebody watches: WATCHED_S from the
last look on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bireme.config import split_worker
from bireme.discovery import plan_notes, run_folder
from bireme.discovery.records import WorkerRecord
from bireme.kv.routing.placement import Flow, WorkerWork
from bireme.metrics import MetricDelta
from bireme.openai.live.state import (
    LiveCounters,
    LiveFlow,
    LiveModel,
    LiveProcesses,
    LiveState,
    LiveWorker,
    LiveWorkerState,
)
from bireme.openai.text.served_model import FollowedModel
from bireme.pipelines.faults import FaultLog

INTERVAL_S = 1.0
WATCHED_S = 10.0
_STAGES = ("prefill", "decode", "multimodal_encoder", "embedding")  # in this order they are shown


class LiveSource:
    """Used on the frontend's loop."""

    def __init__(self, models: Sequence[FollowedModel], totals: Callable[[], MetricDelta]) -> None:
        self._models, self._totals = models, totals
        self._end: asyncio.TimerHandle | None = None
        for model in models:
            model.services.faults = FaultLog(model.name)

    def state(self) -> LiveState:
        """Return how it is now; requests' ways are counted from the first call on."""
        self._watch()
        faults = [fault for model in self._models if (log := model.services.faults) for fault in log.faults()]
        models = [_model(model) for model in self._models]
        folders = {model.run_folder for model in self._models if model.run_folder is not None}
        plans = [note for folder in folders for note in plan_notes.read(folder)]
        counters = _counters(self._totals())
        return LiveState(time.time(), INTERVAL_S, LiveProcesses(1, 1), counters, models, faults, plans)

    def close(self) -> None:
        if self._end is not None:
            self._end.cancel()

    def _watch(self) -> None:
        self.close()
        for model in self._models:
            router = model.services.router
            router.flows = {} if router.flows is None else router.flows
        self._end = asyncio.get_running_loop().call_later(WATCHED_S, self._forget)

    def _forget(self) -> None:
        for model in self._models:
            model.services.router.flows = None


def _model(model: FollowedModel) -> LiveModel:
    services = model.services
    router, recipe = services.router, services.recipe
    workers = [
        _worker(name, record, router.work_of(name), model.run_folder) for name, record in services.members.items()
    ]
    workers.sort(key=lambda worker: (_STAGES.index(worker.stage), worker.server, worker.id))
    return LiveModel(
        model.name, router.mode, router.follows_load, router.problem, services.num_active,
        recipe.limits.max_concurrent_requests, workers, _flows(router.flows or {}),
    )  # fmt: skip


def _worker(name: str, record: WorkerRecord, work: WorkerWork, folder: Path | None) -> LiveWorker:
    report = work.report
    state, reason = _state(name, record, work, folder)
    return LiveWorker(
        id=name,
        stage=record.stage,
        server=split_worker(name)[1],
        state=state,
        reason=reason,
        life=record.life,
        generation=record.generation,
        weight=record.weight,
        running=report.num_running if report else None,
        waiting=report.num_waiting if report else None,
        waiting_tokens=report.num_waiting_tokens if report else None,
        kv_blocks_used=report.num_blocks_used if report else None,
        kv_blocks=report.num_blocks if report else None,
        steps=report.step if report else None,
        sent=work.num_sent,
        nextn=record.capacity.nextn if record.capacity else 0,
    )


def _state(name: str, record: WorkerRecord, work: WorkerWork, folder: Path | None) -> tuple[LiveWorkerState, str]:
    if not record.life:
        return _state_without_engine(name, folder if not split_worker(name)[1] else None)
    if record.is_draining:
        return "draining", "it finishes what it has and takes nothing new"
    if math.isinf(work.skip_s):
        return "skipped", "its host does not answer"
    if work.skip_s:
        return "skipped", f"a request was lost there; skipped for {work.skip_s:.1f} s more"
    return "ready", ""


def _state_without_engine(name: str, folder: Path | None) -> tuple[LiveWorkerState, str]:
    """`folder`: of its launch, if it is in reach."""
    if folder is None:
        return "unknown", "its record is out of this frontend's reach"
    if run_folder.must_sleep(folder, name):
        return "asleep", f"tools/sleep.py {name} --wake wakes it"
    return "down", "its engine starts, or is started again"


def _flows(flows: dict[tuple[str, str], Flow]) -> list[LiveFlow]:
    return [
        LiveFlow(prefill, decode, flow.num_requests, flow.prompt_tokens, flow.cached_tokens)
        for (prefill, decode), flow in sorted(flows.items())
    ]


def _counters(totals: MetricDelta) -> LiveCounters:
    sums: dict[str, float] = {}
    outcomes: dict[str, int] = {}
    for name, labels, value in totals.counters:
        sums[name] = sums.get(name, 0.0) + value
        if name == "bireme_requests_total":
            outcome = labels[-1]
            outcomes[outcome] = outcomes.get(outcome, 0) + int(value)
    return LiveCounters(
        outcomes,
        int(sums.get("bireme_router_prompt_tokens_total", 0)),
        int(sums.get("bireme_router_cached_tokens_total", 0)),
    )
