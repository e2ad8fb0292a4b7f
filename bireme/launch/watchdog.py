"""Heals what Triton never heals itself: a model whose stub process has died.

Such a model still says READY, and its requests hang or fail. Unload plus load brings new stubs, also while an old one
hangs in UNLOADING; load alone does nothing. A model's other stubs end their streams; Triton does not end them, so they
are ended here. A stub that asks to be replaced is treated alike.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from bireme.child_process import Backoff
from bireme.discovery.pulse import PulseReader
from bireme.errors import BiremeError
from bireme.launch import processes
from bireme.launch.console import Console
from bireme.launch.guarded_thread import GuardedThread, GuardedThreads
from bireme.launch.loading import GIVEN_UP, LoadingStubs
from bireme.launch.tritonserver import Server

_INTERVAL_S = 0.25
_INDEX_INTERVAL_S, _INDEX_TIMEOUT_S = 5.0, 2.0  # not longer: the stubs are to be looked at, too
_MAX_BACKOFF_S = 30.0
_IDLE_S = 2.0  # longer than a request waits in Triton for a stub that is idle


@dataclass(slots=True)
class StubState:
    """A model's stubs as last seen."""

    names: tuple[str, ...]
    pids: dict[str, int] = field(default_factory=dict)  # by name
    starts: dict[int, int | None] = field(default_factory=dict)  # with the pid identifies the process
    restarts: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, _MAX_BACKOFF_S))  # after loads that failed in a row
    retry_at: float = 0.0
    loading: LoadingStubs | None = None  # while it heals
    last_error: str = ""
    was_alive: bool = False  # when it could be looked at last

    @property
    def is_healing(self) -> bool:
        return self.loading is not None

    @property
    def is_alive(self) -> bool:
        """Whether all run; the last answer where /proc can't be read."""
        try:
            self.was_alive = len(processes.survivors(self.starts.items())) == len(self.names)
        except OSError:  # this process has no descriptor or memory left: the stub is not dead
            pass
        return self.was_alive


class StubWatchdog:
    """Of one life of a server. `start` once all models are loaded, `stop` before the server's."""

    def __init__(
        self, server: Server, models: Mapping[str, tuple[str, ...]], console: Console, threads: GuardedThreads
    ) -> None:
        """`models`: the names of each one's stubs."""
        self._server = server
        self._console = console
        self._threads = threads
        self._states = {model: StubState(names) for model, names in models.items()}
        self._is_stopping = False
        self._thread: GuardedThread | None = None
        self._has_found = False
        self._next_index = 0.0
        self._idle_since: dict[tuple[int, int | None], float] = {}  # stubs that have been replaced; inf: not idle

    def start(self) -> None:
        with contextlib.suppress(OSError):  # /proc can't be read just now: the first turn looks again
            self._find_all()
        self._thread = self._threads.start("stub-watchdog", self._look, _INTERVAL_S)

    def stop(self) -> None:
        """A load may go on."""
        self._is_stopping = True
        if self._thread is not None:
            self._thread.stop()

    def is_alive(self, model: str) -> bool:
        """True for a model without stubs."""
        state = self._states.get(model)
        return state is None or (state.is_alive and not state.is_healing)

    def stubs(self) -> dict[str, int]:
        """Return name -> pid."""
        return {
            name: pid for state in self._states.values() if not state.is_healing for name, pid in state.pids.items()
        }

    def restarts(self, model: str) -> int:
        state = self._states.get(model)
        return state.restarts if state else 0

    def kill(self, name: str, cause: str) -> None:
        """End a stub that hangs, so that it is replaced."""
        state = next((state for state in self._states.values() if name in state.pids), None)
        if state is None or state.is_healing:
            return
        pid = state.pids[name]
        if processes.kill_all([(pid, state.starts[pid])]):
            self._console.event("stub_killed", "warning", model=name, pid=pid, cause=cause)

    def kill_all(self, model: str, cause: str) -> None:
        if (state := self._states.get(model)) is not None:
            for name in state.names:
                self.kill(name, cause)

    def _is_server_alive(self) -> bool:
        # The kernel knows first: the server's own log line comes a moment later, its stubs' end before that.
        return self._server.is_running and processes.is_alive(self._server.pid)

    def _look(self) -> None:
        now = time.monotonic()
        if not self._has_found:
            self._find_all()
        causes = {model: self._cause(state) for model, state in self._states.items() if not state.is_healing}
        if not self._is_server_alive():
            return
        for model, cause in causes.items():
            if cause and now >= self._states[model].retry_at:
                self._heal_later(model, self._states[model], cause)
        self._end_replaced(now)
        if lost := self._look_at_loads(now):
            # Triton never gives the model up: what else runs there moves to other servers or ends with an error.
            self._console.event("load_lost", "error", models=",".join(lost), reason="a stub died, Triton waits")
            self._server.kill()
            return
        if now >= self._next_index:
            self._next_index = now + _INDEX_INTERVAL_S
            self._look_at_index(now)

    def _look_at_loads(self, now: float) -> list[str]:
        """Return the models whose loads will never end."""
        lost = []
        for model, state in self._states.items():
            if (loading := state.loading) is None:
                continue
            if loading.end_given_up([model], now):
                self._console.event("load_given_up", "warning", model=model, reason=GIVEN_UP)
            if loading.is_one_lost([model], now):
                lost.append(model)
        return lost

    def _cause(self, state: StubState) -> str:
        if not state.is_alive:
            return "stub_died"
        return "stub_worn" if any(map(self._is_worn, state.pids.values())) else ""

    def _is_worn(self, pid: int) -> bool:
        """It has lost too many threads (triton/bls.py)."""
        with contextlib.suppress(OSError):  # this process has no descriptor left
            if (reader := PulseReader.open(self._server.run_folder.shm_prefix, pid)) is not None:
                with contextlib.closing(reader):
                    return reader.is_worn()
        return False

    def _end_replaced(self, now: float) -> None:
        """Once they have had no request for _IDLE_S."""
        for stub in list(self._idle_since):
            prefix = self._server.run_folder.shm_prefix
            reader = PulseReader.open(prefix, stub[0]) if processes.survivors([stub]) else None
            if reader is None:  # it has ended, or does not say whether it is idle
                del self._idle_since[stub]
                continue
            with contextlib.closing(reader):
                self._idle_since[stub] = min(now, self._idle_since[stub]) if reader.is_idle() else math.inf
            if now - self._idle_since[stub] >= _IDLE_S:
                processes.kill_all([stub])

    def _look_at_index(self, now: float) -> None:
        """A model may have been unloaded by hand, or its load have failed halfway."""
        try:
            index = self._server.admin.index(_INDEX_TIMEOUT_S)
        except BiremeError:
            return  # the server ends or is too busy: the stubs are still watched
        for model, state in self._states.items():
            ready = index.get(model, ("", ""))[0] == "READY"
            if not ready and not state.is_healing and now >= state.retry_at:
                self._heal_later(model, state, "not_ready")

    def _heal_later(self, model: str, state: StubState, cause: str) -> None:
        owners = {name: owner for owner, other in self._states.items() for name in other.names}
        state.loading = LoadingStubs(self._server.pid, owners, self._server.run_folder.shm_prefix)
        self._console.event("healing", "warning", model=model, cause=cause, pid=_shown(state))
        try:
            threading.Thread(target=self._heal, args=(model, state), name=f"heal-{model}", daemon=True).start()
        except RuntimeError:  # the system has no thread left: the next look tries again
            state.loading = None
            raise

    def _heal(self, model: str, state: StubState) -> None:
        began = time.monotonic()
        try:
            self._reload(model)
            self._find(model, state)
            state.restarts += 1
            state.last_error = ""
            state.backoff.reset()
            self._console.event("healed", model=model, seconds=time.monotonic() - began, pid=_shown(state))
        except (BiremeError, OSError) as error:
            state.last_error = str(error)
            delay = state.backoff.next_s()
            state.retry_at = time.monotonic() + delay
            if not self._is_stopping and self._server.is_running:
                self._console.event("heal_failed", "error", model=model, error=error, retry_in_s=delay)
        finally:
            state.loading = None

    def _reload(self, model: str) -> None:
        try:
            self._server.admin.unload(model)
        except BiremeError as error:
            self._console.event("unload_failed", "warning", model=model, error=error)
        self._server.load(model)

    def _find_all(self) -> None:
        found = processes.stubs(self._server.pid)
        for state in self._states.values():
            _take(state, found, ())
        self._has_found = True

    def _find(self, model: str, state: StubState) -> None:
        former = dict(state.starts)
        _take(state, processes.stubs(self._server.pid), tuple(former))
        self._idle_since.update(dict.fromkeys(former.items(), math.inf))
        self._server.note_members()
        if missing := [name for name in state.names if name not in state.pids]:
            raise BiremeError(f"model {model} was loaded but has no stub process {', '.join(missing)}")


def _take(state: StubState, found: Mapping[str, list[int]], former: tuple[int, ...]) -> None:
    """Note the youngest process of each name; `former` ones may still be ending."""
    state.pids, state.starts = {}, {}
    for name in state.names:
        starts = {pid: processes.started_at(pid) for pid in found.get(name, []) if pid not in former}
        pid = max(starts, default=None, key=lambda pid: starts[pid] or 0)
        if pid is not None and starts[pid] is not None:
            state.pids[name], state.starts[pid] = pid, starts[pid]
    state.was_alive = len(state.pids) == len(state.names)


def _shown(state: StubState) -> str:
    return ",".join(map(str, state.pids.values())) or "none"
