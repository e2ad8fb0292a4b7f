"""The truth about readiness: every port answers, every process lives, every path through the deployment serves.

Triton calls a model READY whose stub has died. Checked are ports (doors.py), signs of life (process_watch.py), workers'
series, and canaries (canaries.py). A process that hangs is killed; its owner starts it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bireme.config import WORKER_STAGES, Recipe, stage_of
from bireme.discovery import run_folder
from bireme.errors import BiremeError
from bireme.launch import processes
from bireme.launch.canaries import OPENAI, Canaries, CanarySettings, OpenAITarget
from bireme.launch.console import Console
from bireme.launch.doors import INTERVAL_S, Door, ask_grpc, ask_http, get
from bireme.launch.frontend import FrontendProcess
from bireme.launch.guarded_thread import GuardedThread, GuardedThreads
from bireme.launch.process_watch import LOOK_S, ProcessWatch
from bireme.launch.series import WorkerSeries, total, worker_series
from bireme.launch.tritonserver import Server
from bireme.launch.watchdog import StubWatchdog
from bireme.multimodal.model_config import picture_model_of

_SERVER = "tritonserver"
_ENGINE = "/engine"
_PUBLISHED_S = 0.6  # until the metrics page shows an engine's end


@dataclass(slots=True)
class WorkerHealth:
    """A worker's state on the metrics page."""

    engine_up: bool | None = None
    publishes: bool | None = None
    steps: float | None = None
    queued: float = 0.0
    moved_at: float = field(default_factory=time.monotonic)  # when a step was last seen, or nothing was queued
    engine_pid: int | None = None
    doubted_until: float = 0.0  # its engine has just ended, which the page may not show yet

    def take(self, series: WorkerSeries) -> None:
        now = time.monotonic()
        if series.steps != self.steps or not series.queued:
            self.moved_at = now
        self.publishes = series.publishes
        self.engine_up = False if now < self.doubted_until else series.engine_up
        self.steps, self.queued = series.steps, series.queued

    def take_engine(self, pid: int | None) -> None:
        if self.engine_pid not in (None, pid):
            self.engine_up, self.doubted_until = False, time.monotonic() + _PUBLISHED_S
        self.engine_pid = pid if pid is not None else self.engine_pid


class HealthMonitor:
    """Of one life of a server. `start` once all models are loaded, `stop` before the server's."""

    def __init__(
        self,
        server: Server,
        watchdog: StubWatchdog,
        recipe: Recipe,
        models: tuple[str, ...],
        console: Console,
        threads: GuardedThreads,
        canaries: CanarySettings,
        frontend: FrontendProcess | None = None,
        key: str = "",
    ) -> None:
        """`key`: the deployment's."""
        self._server, self._watchdog, self._recipe = server, watchdog, recipe
        self._models = models
        self._console, self._threads = console, threads
        self._frontend = frontend
        self._stall_s = recipe.supervisor.stall_timeout_s
        self._has_pictures = picture_model_of(recipe) is not None
        self._workers = {name: WorkerHealth() for stage in recipe.workers for name in recipe.replicas(stage)}
        self._series: Mapping[str, WorkerSeries] = {}
        self._doors = self._make_doors()
        self._watch = ProcessWatch(self._find, self._end, server.run_folder.shm_prefix, self._stall_s)
        self._watch.take_sign(_SERVER, lambda: sum(door.answers for door in self._doors))
        target = OpenAITarget(frontend.address, frontend.key, frontend.has_tls) if frontend else None
        self._canary_interval_s = canaries.interval_s
        self._canaries = Canaries(
            server.http, recipe, models, target, canaries, console,
            series=lambda: self._series, is_down=self._is_down, on_hung=self._watchdog.kill_all,
            key=key,
        )  # fmt: skip
        self._running: list[GuardedThread] = []
        self._is_stopping = False

    def start(self) -> None:
        turns = [("health", self._watch.turn, LOOK_S)]
        turns += [(f"door-{door.name}", door.turn, INTERVAL_S) for door in self._doors]
        self._running = [self._threads.start(*turn) for turn in turns]
        if self._canary_interval_s > 0:
            self._running.append(self._threads.start("canary", self._canaries.turn))

    def stop(self) -> None:
        """A canary may go on."""
        self._is_stopping = self._canaries.is_stopping = True
        for thread in self._running:
            thread.stop(timeout_s=0)

    def busy_models(self) -> list[str]:
        """Return the models with running requests.

        Of decode the engine's count holds: most streams are subscriptions of the token bus, even when idle.
        """
        try:
            series = worker_series(self._server.metrics_text())
        except BiremeError:  # too busy to answer, or gone
            return list(self._models) if self._server.is_running else []
        figures = {name: total(series, self._recipe.instances(name)) for name in self._models}
        return [
            name
            for name, of_stubs in figures.items()
            if of_stubs is not None and self._watchdog.is_alive(name)
            if of_stubs.queued or (of_stubs.streams and stage_of(name) != "decode")
        ]

    def report(self) -> dict[str, Any]:
        """Return status (ready, degraded, not_ready), and what is wrong where."""
        wrong = self._watch.problems()
        problems = {name: self._worker_problem(name, wrong) for name in self._workers}
        models = {name: self._model_problem(name, wrong) for name in self._models}
        doors = {door.name: door.problem for door in self._doors}
        paths = self._canaries.problems()
        members: dict[str, str] = {}
        if self._frontend:
            members, doors[OPENAI] = self._frontend.problems(), self._frontend.problem
        others = [problem for name, problem in models.items() if name not in problems]
        is_broken = any((wrong.get(_SERVER), *doors.values(), *paths.values(), *others))
        return {
            "status": "not_ready" if is_broken else self._status(problems, bool(members)),
            "doors": _states(doors),
            "workers": {name: self._worker_report(name, problem) for name, problem in problems.items()},
            "models": _states(models),
            "paths": {
                name: {"ready": not problem, "reason": problem, "canaries": self._canaries.successes(name)}
                for name, problem in paths.items()
            },
            "processes": wrong | members,
        }

    def _worker_report(self, name: str, problem: str) -> dict[str, Any]:
        worker = self._workers[name]
        return {
            "ready": not problem,
            "reason": problem,
            "engine_up": worker.engine_up,
            "publishes": worker.publishes,
            "steps": worker.steps,
            "queued": worker.queued,
            "stub_restarts": self._watchdog.restarts(name),
        }

    def _model_problem(self, name: str, wrong: Mapping[str, str]) -> str:
        if not self._watchdog.is_alive(name):
            return "stub is down"
        return next((f"stub: {wrong[stub]}" for stub in self._recipe.instances(name) if stub in wrong), "")

    def _worker_problem(self, name: str, wrong: Mapping[str, str]) -> str:
        worker = self._workers[name]
        if problem := self._model_problem(name, wrong):
            return problem
        if problem := wrong.get(name + _ENGINE, ""):
            return f"engine: {problem}"
        is_asleep = run_folder.must_sleep(self._server.run_folder.path, name)
        if worker.engine_up is False:
            return "asleep" if is_asleep else "engine is down"
        if is_asleep:
            return "going to sleep"
        stalled_s = time.monotonic() - worker.moved_at
        if worker.queued and stalled_s > self._stall_s:
            return f"no step for {stalled_s:.0f} s with {worker.queued:.0f} requests queued"
        return self._canaries.problem(name)

    def _is_down(self, name: str) -> bool:
        """Known without a canary."""
        if name == OPENAI:
            return self._frontend is None or bool(self._frontend.door.problem)
        if not self._server.is_running or not self._watchdog.is_alive(name):
            return True
        return name in self._workers and self._workers[name].engine_up is False

    def _status(self, problems: Mapping[str, str], has_lost_members: bool) -> str:
        """Return the status while all but workers is well. `problems`: the workers'."""
        if not self._server.is_running:
            return "not_ready"
        for stage in self._recipe.workers:
            own = self._recipe.replicas(stage)  # none: other servers have this stage
            if own and self._is_essential(stage) and all(map(problems.get, own)):
                return "not_ready"
        is_silent = any(worker.publishes is False for worker in self._workers.values())
        return "degraded" if has_lost_members or is_silent or any(problems.values()) else "ready"

    def _is_essential(self, stage: str) -> bool:
        """Decode does prefill's work, unless the recipe forbids it or prefill encodes pictures."""
        if stage != "prefill":
            return True
        looks_at_pictures = self._has_pictures and self._recipe.encoder_stage == stage
        return self._recipe.pipeline.enforce_disaggregation or looks_at_pictures

    def _make_doors(self) -> list[Door]:
        server, tls = self._server, self._server.options.grpc_tls
        doors = [
            Door("http", ask_http(server.http, "/v2/health/live")),
            Door("grpc", ask_grpc(server.grpc, tls.client_context() if tls is not None else None)),
            Door("metrics", self._read_metrics),
        ]
        return [door for door in doors if f"--allow-{door.name}=false" not in server.options.arguments]

    def _read_metrics(self, timeout_s: float) -> None:
        self._series = worker_series(get(self._server.metrics, "/metrics", timeout_s).decode())
        for name, worker in self._workers.items():
            if name in self._series:
                worker.take(self._series[name])

    def _find(self) -> dict[str, int]:
        """Return name -> pid: the server, its stubs, and what they have started."""
        if not self._server.is_running:
            return {}
        stubs = self._watchdog.stubs()
        found = {_SERVER: self._server.pid, **stubs}
        for name, pid in stubs.items():
            found |= (started := {_child_name(name, child): child for child in processes.children(pid)})
            if name in self._workers:
                self._workers[name].take_engine(started.get(name + _ENGINE))
        return found

    def _end(self, name: str, pid: int, cause: str) -> None:
        if self._is_stopping:
            return
        if name in self._watchdog.stubs():
            self._watchdog.kill(name, cause)
            return
        self._console.event("process_killed", "error", process=name, pid=pid, cause=cause)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _states(problems: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {name: {"ready": not problem, "reason": problem} for name, problem in problems.items()}


def _child_name(owner: str, pid: int) -> str:
    is_engine = stage_of(owner) in WORKER_STAGES and processes.is_engine(pid)
    return owner + _ENGINE if is_engine else f"{owner}/{pid}"
