"""Heals what this Triton never heals itself: a model whose stub process has died.

Such a model still says READY, its streams hang and each new request fails. Unload plus load brings a new
stub, also while the old one hangs in UNLOADING; load alone does nothing. Models that call it keep running.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bireme.errors import BiremeError
from bireme.launch import processes
from bireme.launch.console import Console
from bireme.launch.tritonserver import Server

_INTERVAL_S = 0.25
_INDEX_INTERVAL_S = 5.0
_MAX_BACKOFF_S = 30.0


@dataclass(slots=True)
class StubState:
    """One model's stub as the watchdog last saw it."""

    pid: int | None = None
    start: int | None = None  # with the pid names the process for good
    restarts: int = 0
    failures: int = 0  # loads that failed in a row
    retry_at: float = 0.0
    is_healing: bool = False
    last_error: str = ""

    @property
    def is_alive(self) -> bool:
        return self.pid is not None and processes.started_at(self.pid) == self.start and processes.is_alive(self.pid)


class StubWatchdog:
    """Watches the stubs of one life of a server. `start` once all models are loaded, `stop` before the server's."""

    def __init__(self, server: Server, models: Iterable[str], console: Console) -> None:
        self._server = server
        self._console = console
        self._states = {model: StubState() for model in models}
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="heal")
        self._thread = threading.Thread(target=self._run, name="stub-watchdog", daemon=True)
        self._next_index = 0.0

    def start(self) -> None:
        self._find_all()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def is_alive(self, model: str) -> bool:
        """Return whether the model's stub runs; true for a model without one."""
        state = self._states.get(model)
        return state is None or (state.is_alive and not state.is_healing)

    @property
    def has_lost_stubs(self) -> bool:
        """Whether a stub has died in this life: Triton may count its instance as live for ever."""
        return any(state.restarts or not state.is_alive for state in self._states.values())

    def restarts(self, model: str) -> int:
        state = self._states.get(model)
        return state.restarts if state else 0

    def kill(self, model: str, cause: str) -> None:
        """End a stub that hangs, so that it is replaced."""
        state = self._states[model]
        if not state.is_healing and state.is_alive and state.pid is not None:
            self._console.event("stub_killed", "warning", model=model, pid=state.pid, cause=cause)
            processes.kill_all([(state.pid, state.start)])

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self._look()
            if not self._is_server_alive():
                return  # a new server gets a watchdog of its own

    def _is_server_alive(self) -> bool:
        # Asked of the kernel: the server's own word comes a moment later, its stubs' end before that.
        return self._server.is_running and processes.is_alive(self._server.pid)

    def _look(self) -> None:
        now = time.monotonic()
        dead = [model for model, state in self._states.items() if not (state.is_healing or state.is_alive)]
        if not self._is_server_alive():
            return
        for model in dead:
            if now >= self._states[model].retry_at:
                self._heal_later(model, self._states[model], "stub_died")
        if now >= self._next_index:
            self._next_index = now + _INDEX_INTERVAL_S
            self._look_at_index(now)

    def _look_at_index(self, now: float) -> None:
        """A model may also have been unloaded by hand, or its load have failed halfway."""
        try:
            index = self._server.admin.index()
        except BiremeError:
            return  # the server ends or is too busy: the stubs are still watched
        for model, state in self._states.items():
            ready = index.get(model, ("", ""))[0] == "READY"
            if not ready and not state.is_healing and now >= state.retry_at:
                self._heal_later(model, state, "not_ready")

    def _heal_later(self, model: str, state: StubState, cause: str) -> None:
        state.is_healing = True
        self._console.event("healing", "warning", model=model, cause=cause, pid=state.pid)
        self._pool.submit(self._heal, model, state)

    def _heal(self, model: str, state: StubState) -> None:
        began = time.monotonic()
        try:
            self._reload(model)
            self._find(model, state)
            state.restarts += 1
            state.failures, state.last_error = 0, ""
            self._console.event("healed", model=model, seconds=time.monotonic() - began, pid=state.pid)
        except BiremeError as error:
            state.failures += 1
            state.last_error = str(error)
            delay = min(2.0 ** (state.failures - 1), _MAX_BACKOFF_S)
            state.retry_at = time.monotonic() + delay
            if not self._stopping.is_set() and self._server.is_running:
                self._console.event("heal_failed", "error", model=model, error=error, retry_in_s=delay)
        finally:
            state.is_healing = False

    def _reload(self, model: str) -> None:
        try:
            self._server.admin.unload(model)
        except BiremeError as error:
            self._console.event("unload_failed", "warning", model=model, error=error)
        self._server.admin.load(model)

    def _find_all(self) -> None:
        found = processes.stubs(self._server.pid)
        for model, state in self._states.items():
            _take(state, found.get(model, []))

    def _find(self, model: str, state: StubState) -> None:
        _take(state, [pid for pid in self._server.stub_pids(model) if pid != state.pid])
        self._server.note_members()
        if state.pid is None:
            raise BiremeError(f"model {model} was loaded but has no stub process")


def _take(state: StubState, pids: list[int]) -> None:
    state.pid = max(pids, default=None, key=lambda pid: processes.started_at(pid) or 0)
    state.start = processes.started_at(state.pid) if state.pid is not None else None
