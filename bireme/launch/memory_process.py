"""The memory service of a launch: a process that outlives tritonserver and is started again if it dies."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bireme.child_process import Backoff, ChildProcess
from bireme.config import CHECKOUT
from bireme.engines.memory.wire import socket_path
from bireme.launch.console import Console
from bireme.launch.guarded_thread import GuardedThread, GuardedThreads

_LOOK_S = 0.2
_START_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_STEADY_S = 60.0  # after so long a life the pause is short again


class MemoryProcess:
    """Engines serve without it, too."""

    def __init__(self, run_dir: Path, key: str, console: Console, threads: GuardedThreads) -> None:
        self._run_dir, self._key = run_dir, key
        self._console, self._threads = console, threads
        self._process: ChildProcess | None = None
        self._keeper: GuardedThread | None = None
        self._began_at = self._start_at = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    @property
    def pid(self) -> int:
        """0: it does not run."""
        return self._process.pid if self._process is not None and self._process.exit_code is None else 0

    def start(self) -> None:
        """Wait until engines can ask it; then it is kept alive."""
        self._keeper = self._threads.start("memory-service", self._keep, _LOOK_S)
        deadline = time.monotonic() + _START_S
        while not socket_path(self._run_dir).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not socket_path(self._run_dir).exists():
            self._console.event("memory_service_late", "warning", waited_s=_START_S)

    def stop(self) -> None:
        """Frees weights that no engine has mapped. Harmless when repeated."""
        if self._keeper is not None:
            self._keeper.stop()
        if self._process is not None:
            self._process.reap()

    def _keep(self) -> None:
        now = time.monotonic()
        if self.pid:
            return
        if self._process is not None and not self._start_at:
            if now - self._began_at > _STEADY_S:
                self._backoff.reset()
            pause_s = self._backoff.next_s()
            self._start_at = now + pause_s
            code = self._process.exit_code
            self._console.event("memory_service_died", "error", code=code, restart_in_s=pause_s)
        if now >= self._start_at:
            self._process = self._spawn()  # OSError: the next turn tries again
            self._began_at, self._start_at = now, 0.0
            self._console.event("memory_service_started", pid=self._process.pid)

    def _spawn(self) -> ChildProcess:
        command = [sys.executable, "-m", "bireme.engines.memory.service", "--run-dir", str(self._run_dir)]
        path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))))
        own = {"PYTHONPATH": path, "BIREME_RUN_DIR": str(self._run_dir), "BIREME_KEY": self._key}
        return ChildProcess([*command, "--parent", str(os.getpid())], os.environ | own)
