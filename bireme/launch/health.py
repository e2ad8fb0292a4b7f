"""The truth about readiness: per worker, is its stub alive, its engine up, does it make steps, does it generate.

Triton itself calls a model READY whose stub has died, so load balancers should ask here instead.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from bireme.config import Recipe, stage_of
from bireme.errors import BiremeError
from bireme.launch.canary import CanaryResult, probe_decode, probe_pipeline
from bireme.launch.console import Console
from bireme.launch.series import WorkerSeries, worker_series
from bireme.launch.tritonserver import Server
from bireme.launch.watchdog import StubWatchdog

_INTERVAL_S = 1.0
_MAX_SILENCES = 3  # canaries in a row without an answer, with no step made: the stub hangs
PIPELINE = "completion"


@dataclass(slots=True)
class WorkerHealth:
    """What is known of one worker."""

    engine_up: bool | None = None
    steps: float | None = None
    queued: float = 0.0
    moved_at: float = field(default_factory=time.monotonic)  # when a step was last seen, or nothing was queued
    canary: CanaryResult | None = None  # None: none yet
    canary_at: float = 0.0
    steps_at_canary: float | None = None
    silences: int = 0  # canaries in a row without an answer

    def take(self, series: WorkerSeries) -> None:
        if series.steps != self.steps or not series.queued:
            self.moved_at = time.monotonic()
        self.engine_up, self.steps, self.queued = series.engine_up, series.steps, series.queued

    def take_canary(self, result: CanaryResult) -> None:
        self.canary, self.canary_at, self.steps_at_canary = result, time.monotonic(), self.steps
        self.silences = self.silences + 1 if result.is_silent else 0


class HealthMonitor:
    """Watches one life of a server. `start` once all models are loaded, `stop` before the server's."""

    def __init__(
        self,
        server: Server,
        watchdog: StubWatchdog,
        recipe: Recipe,
        models: tuple[str, ...],
        console: Console,
        canary_interval_s: float = 30.0,
        canary_timeout_s: float = 20.0,
    ) -> None:
        self._server = server
        self._watchdog = watchdog
        self._recipe = recipe
        self._models = models
        self._console = console
        self._canary_interval_s = canary_interval_s
        self._canary_timeout_s = canary_timeout_s
        self._stall_s = recipe.supervisor.stall_timeout_s
        self._workers = {name: WorkerHealth() for stage in recipe.workers for name in recipe.replicas(stage)}
        self._pipeline = WorkerHealth()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._poll, name="health", daemon=True)]
        if canary_interval_s > 0:
            self._threads.append(threading.Thread(target=self._probe, name="canary", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """A canary under way is not waited for: its server is about to end."""
        self._stopping.set()

    def busy_models(self) -> list[str]:
        """Return the models that have requests under way, by what their own stubs and engines say.

        Most streams of decode are subscriptions of the token bus, however idle: there the engine's count holds.
        """
        try:
            series = worker_series(self._server.metrics_text())
        except BiremeError:  # too busy to say, or gone
            return list(self._models) if self._server.is_running else []
        return [
            name
            for name in self._models
            if name in series and self._watchdog.is_alive(name)
            if series[name].queued or (series[name].streams and stage_of(name) != "decode")
        ]

    def report(self) -> dict[str, Any]:
        """Return status (ready, degraded, not_ready) and each model's state, ready for JSON."""
        problems = {name: self._problem(name) for name in self._workers}
        models = {name: "" if self._watchdog.is_alive(name) else "stub is down" for name in self._models}
        pipeline = self._canary_problem(self._pipeline)
        return {
            "status": self._status(problems, models, pipeline),
            "workers": {name: self._worker_report(name, problem) for name, problem in problems.items()},
            "models": {name: {"ready": not problem, "reason": problem} for name, problem in models.items()},
            "pipeline": {"ready": not pipeline, "reason": pipeline},
        }

    def _worker_report(self, name: str, problem: str) -> dict[str, Any]:
        worker = self._workers[name]
        return {
            "ready": not problem,
            "reason": problem,
            "engine_up": worker.engine_up,
            "steps": worker.steps,
            "queued": worker.queued,
            "stub_restarts": self._watchdog.restarts(name),
        }

    def _problem(self, name: str) -> str:
        """Return why a worker can't serve now; empty when it can."""
        worker = self._workers[name]
        if not self._watchdog.is_alive(name):
            return "stub is down"
        if worker.engine_up is False:
            return "engine is down"
        stalled_s = time.monotonic() - worker.moved_at
        if worker.queued and stalled_s > self._stall_s:
            return f"no step for {stalled_s:.0f} s with {worker.queued:.0f} requests queued"
        return self._canary_problem(worker)

    def _canary_problem(self, worker: WorkerHealth) -> str:
        return f"canary failed: {worker.canary.error}" if worker.canary and not worker.canary.is_ok else ""

    def _status(self, problems: dict[str, str], models: dict[str, str], pipeline: str) -> str:
        if not self._server.is_running or pipeline or any(models[name] for name in models if name not in problems):
            return "not_ready"
        for stage in self._recipe.workers:
            if all(problems[name] for name in self._recipe.replicas(stage)) and self._is_essential(stage):
                return "not_ready"
        return "degraded" if any(problems.values()) else "ready"

    def _is_essential(self, stage: str) -> bool:
        """Without prefill workers, decode does their work, unless the recipe forbids it."""
        if stage == "video_diffusion":
            return "decode" not in self._recipe.workers
        return stage == "decode" or (stage == "prefill" and self._recipe.pipeline.enforce_disaggregation)

    def _poll(self) -> None:
        while not self._stopping.is_set():
            try:
                found = worker_series(self._server.metrics_text())
            except BiremeError:
                found = {}
            for name, worker in self._workers.items():
                if name in found:
                    worker.take(found[name])
            self._stopping.wait(_INTERVAL_S)

    def _probe(self) -> None:
        while not self._stopping.is_set():
            for name in self._recipe.replicas("decode"):
                self._probe_worker(name)
            if PIPELINE in self._models and not self._stopping.is_set():
                self._pipeline.take_canary(probe_pipeline(self._server.http, PIPELINE, self._canary_timeout_s))
                self._say("pipeline", self._pipeline)
            self._stopping.wait(self._next_probe_s())

    def _next_probe_s(self) -> float:
        """A failure is looked at again soon, so that readiness returns with the worker."""
        failed = any(self._canary_problem(worker) for worker in (*self._workers.values(), self._pipeline))
        return min(self._canary_interval_s, 1.0) if failed else self._canary_interval_s

    def _probe_worker(self, name: str) -> None:
        worker = self._workers[name]
        is_stepping = worker.steps is not None and worker.steps != worker.steps_at_canary and worker.queued
        if self._stopping.is_set() or not self._watchdog.is_alive(name):
            return
        if is_stepping and worker.canary is not None:
            worker.take_canary(CanaryResult())  # the work that it does proves more, and a canary would queue behind it
            return
        worker.take_canary(probe_decode(self._server.http, name, self._canary_timeout_s))
        self._say(name, worker)
        if worker.silences >= _MAX_SILENCES and not self._stopping.is_set():
            worker.silences = 0
            self._watchdog.kill(name, f"{_MAX_SILENCES} canaries without an answer")

    def _say(self, name: str, worker: WorkerHealth) -> None:
        if worker.canary and not worker.canary.is_ok and not self._stopping.is_set():
            self._console.event("canary_failed", "warning", worker=name, error=worker.canary.error)
