"""The load of models side by side, and their stubs meanwhile, for which Triton 2.51 may wait for ever.

It does not notice one that is killed at once. One that gets no CPU for a second it gives up, and waits for its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from bireme.discovery.pulse import pulse_path
from bireme.errors import BiremeError, UnavailableError
from bireme.launch import processes
from bireme.launch.console import Console
from bireme.launch.tritonserver import Server, ServerStartError

_PARALLEL_LOADS = 8  # each holds one of the server's HTTP threads
_PROGRESS_S = 5.0
_LOOK_S = 0.5  # a look at the server's stubs asks each of its hundreds of threads
_DEATH_S = 5.0  # from the close of its connections to the end of a dying process, with its core dump
_UNNOTICED_S = 10.0  # Triton itself notices the death of others within a second
_GIVEN_UP_S = 20.0  # Triton itself goes on at once, to the model's next stub or to the end of the load

GIVEN_UP = "tritonserver does not see that its stub has started"


class LoadingStubs:
    def __init__(self, server_pid: int, models: Mapping[str, str], pulse_prefix: str) -> None:
        """`models`: of each stub's name. Children of now are none of the loads."""
        self._server_pid = server_pid
        self._models = models
        self._pulse_prefix = pulse_prefix
        self._former = set(processes.children(server_pid))
        self._seen: dict[int, str] = {}  # pid -> model: a zombie's command line is gone
        self._dead_since: dict[int, float] = {}
        self._started_since: dict[str, float] = {}  # model -> since when all its stubs of now have started
        self.given_up: set[str] = set()  # models whose stubs were ended

    def is_one_lost(self, loading: Collection[str], now: float) -> bool:
        """Return whether a stub of these models has been dead for long."""
        dead = [pid for pid in self._children() if self._seen.get(pid) in (None, *loading)]
        dead = [pid for pid in dead if processes.state(pid) == "Z"]
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in dead}
        return any(now - since >= _UNNOTICED_S for since in self._dead_since.values())

    def end_given_up(self, loading: Collection[str], now: float) -> list[str]:
        """End the stubs of models whose load goes on long after all have started; return the models."""
        alive = self._alive(loading)
        started = [model for model, pids in alive.items() if all(map(self._has_started, pids))]
        self._started_since = {model: self._started_since.get(model, now) for model in started}
        given_up = [model for model, since in self._started_since.items() if now - since >= _GIVEN_UP_S]
        self.given_up.update(given_up)
        for model in given_up:
            processes.kill_all([(pid, processes.started_at(pid)) for pid in alive[model]])
        return given_up

    def _alive(self, loading: Collection[str]) -> dict[str, list[int]]:
        alive: dict[str, list[int]] = {}
        for pid in self._children():
            if (model := self._seen.get(pid)) in loading and processes.state(pid) != "Z":
                alive.setdefault(str(model), []).append(pid)
        return alive

    def _children(self) -> list[int]:
        children = [pid for pid in processes.children(self._server_pid) if pid not in self._former]
        for pid in children:
            if pid not in self._seen and (name := processes.stub_name(processes.command_line(pid))) in self._models:
                self._seen[pid] = self._models[str(name)]
        return children

    def _has_started(self, pid: int) -> bool:
        """Its stage has a pulse."""
        return pulse_path(self._pulse_prefix, pid).exists()


def load_models(
    server: Server, models: Collection[str], owners: Mapping[str, str], console: Console, stopping: threading.Event
) -> None:
    """Return when all are loaded or `stopping` is set. Raises ServerStartError.

    `owners`: the model of each stub's name.
    """
    began = time.monotonic()
    stubs = LoadingStubs(server.pid, owners, server.run_folder.shm_prefix)
    pool = ThreadPoolExecutor(_PARALLEL_LOADS, thread_name_prefix="load")
    loads = {pool.submit(_load, server, model, stubs, console): model for model in models}
    try:
        _await_loads(server, loads, stubs, console, stopping, began)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if stopping.is_set():
        return
    failed = {model: error for future, model in loads.items() if (error := future.exception())}
    if failed:
        # Its connections end before the process does.
        if any(isinstance(error, UnavailableError) for error in failed.values()) and server.wait(_DEATH_S):
            raise server.exit_error()
        text = "".join(f"\n  model {model}: {error}" for model, error in failed.items())
        raise ServerStartError(f"{len(failed)} of {len(models)} models did not load:{text}")


def _load(server: Server, model: str, stubs: LoadingStubs, console: Console) -> None:
    began = time.monotonic()
    try:
        server.load(model)
    except BiremeError:
        if model not in stubs.given_up:
            raise
        server.load(model)
    console.event("loaded", model=model, seconds=time.monotonic() - began)


def _await_loads(
    server: Server,
    loads: Mapping[Future[None], str],
    stubs: LoadingStubs,
    console: Console,
    stopping: threading.Event,
    began: float,
) -> None:
    waiting, next_word = set(loads), began + _PROGRESS_S
    while waiting and not stopping.is_set():
        waiting = wait(waiting, timeout=_LOOK_S).not_done
        if not server.is_running:
            raise server.exit_error()
        loading, now = sorted(loads[future] for future in waiting), time.monotonic()
        if stubs.is_one_lost(loading, now):
            raise ServerStartError(f"loading {', '.join(loading)}: a stub died, and tritonserver waits for it")
        for model in stubs.end_given_up(loading, now):
            console.event("load_given_up", "warning", model=model, reason=GIVEN_UP)
        if waiting and time.monotonic() >= next_word:
            next_word += _PROGRESS_S
            console.event("loading", models=",".join(loading), elapsed_s=round(time.monotonic() - began))
