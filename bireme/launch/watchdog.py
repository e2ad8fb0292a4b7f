"""Heals what Triton never heals itself: a model whose stub process has died.

Such a model still says READY, its streams hang and each new request fails. Unload plus load brings a new stub, also
while the old one hangs in UNLOADING; load alone does nothing. Models that call it keep running.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from bireme.child_process import Backoff
from bireme.errors import BiremeError
from bireme.launch import processes
from bireme.launch.console import Console
from bireme.launch.guarded_thread import GuardedThread, GuardedThreads
from bireme.launch.tritonserver import Server

_INTERVAL_S = 0.25
_INDEX_INTERVAL_S, _INDEX_TIMEOUT_S = 5.0, 2.0  # not longer: the stubs are to be looked at, too
_MAX_BACKOFF_S = 30.0


@dataclass(slots=True)
class StubState:
    """A model's stub as last seen."""

    pid: int | None = None
    start: int | None = None  # with the pid identifies the process
    restarts: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, _MAX_BACKOFF_S))  # after loads that failed in a row
    retry_at: float = 0.0
    is_healing: bool = False
    last_error: str = ""
    was_alive: bool = False  # when it could be looked at last

    @property
    def is_alive(self) -> bool:
        """Whether the stub runs; the last answer where /proc can't be read now."""
        try:
            self.was_alive = bool(self.pid is not None and processes.survivors([(self.pid, self.start)]))
        except OSError:  # this process has no descriptor or memory left: the stub is not dead
            pass
        return self.was_alive


class StubWatchdog:
    """Watches the stubs of one life of a server. `start` once all models are loaded, `stop` before the server's."""

    def __init__(self, server: Server, models: Iterable[str], console: Console, threads: GuardedThreads) -> None:
        self._server = server
        self._console = console
        self._threads = threads
        self._states = {model: StubState() for model in models}
        self._is_stopping = False
        self._thread: GuardedThread | None = None
        self._has_found = False
        self._next_index = 0.0

    def start(self) -> None:
        with contextlib.suppress(OSError):  # /proc can't be read just now: the first turn looks again
            self._find_all()
        self._thread = self._threads.start("stub-watchdog", self._look, _INTERVAL_S)

    def stop(self) -> None:
        """Does not wait for a running load: its server is about to end."""
        self._is_stopping = True
        if self._thread is not None:
            self._thread.stop()

    def is_alive(self, model: str) -> bool:
        """Return whether the model's stub runs; true for a model without one."""
        state = self._states.get(model)
        return state is None or (state.is_alive and not state.is_healing)

    def stubs(self) -> dict[str, int]:
        """Return model -> pid of the stubs that are meant to run now."""
        return {name: state.pid for name, state in self._states.items() if state.pid and not state.is_healing}

    def restarts(self, model: str) -> int:
        state = self._states.get(model)
        return state.restarts if state else 0

    def kill(self, model: str, cause: str) -> None:
        """End a stub that hangs, so that it is replaced."""
        state = self._states.get(model)
        if state is not None and not state.is_healing and state.is_alive and state.pid is not None:
            self._console.event("stub_killed", "warning", model=model, pid=state.pid, cause=cause)
            processes.kill_all([(state.pid, state.start)])

    def _is_server_alive(self) -> bool:
        # The kernel knows first: the server's own log line comes a moment later, its stubs' end before that.
        return self._server.is_running and processes.is_alive(self._server.pid)

    def _look(self) -> None:
        now = time.monotonic()
        if not self._has_found:
            self._find_all()
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
            index = self._server.admin.index(_INDEX_TIMEOUT_S)
        except BiremeError:
            return  # the server ends or is too busy: the stubs are still watched
        for model, state in self._states.items():
            ready = index.get(model, ("", ""))[0] == "READY"
            if not ready and not state.is_healing and now >= state.retry_at:
                self._heal_later(model, state, "not_ready")

    def _heal_later(self, model: str, state: StubState, cause: str) -> None:
        state.is_healing = True
        self._console.event("healing", "warning", model=model, cause=cause, pid=state.pid)
        try:
            threading.Thread(target=self._heal, args=(model, state), name=f"heal-{model}", daemon=True).start()
        except RuntimeError:  # the system has no thread left: the next look tries again
            state.is_healing = False
            raise

    def _heal(self, model: str, state: StubState) -> None:
        began = time.monotonic()
        try:
            self._reload(model)
            self._find(model, state)
            state.restarts += 1
            state.last_error = ""
            state.backoff.reset()
            self._console.event("healed", model=model, seconds=time.monotonic() - began, pid=state.pid)
        except (BiremeError, OSError) as error:
            state.last_error = str(error)
            delay = state.backoff.next_s()
            state.retry_at = time.monotonic() + delay
            if not self._is_stopping and self._server.is_running:
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
        self._has_found = True

    def _find(self, model: str, state: StubState) -> None:
        _take(state, [pid for pid in self._server.stub_pids(model) if pid != state.pid])
        self._server.note_members()
        if state.pid is None:
            raise BiremeError(f"model {model} was loaded but has no stub process")


def _take(state: StubState, pids: list[int]) -> None:
    state.pid = max(pids, default=None, key=lambda pid: processes.started_at(pid) or 0)
    state.start = processes.started_at(state.pid) if state.pid is not None else None
    state.was_alive = state.start is not None
