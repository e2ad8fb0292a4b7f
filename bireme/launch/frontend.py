"""The OpenAI frontend of a launch: a process that is started again when it dies, and drained first at the end.

with deployment, FrontendProcess(settings, console):
    deployment.supervise()
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from bireme.child_process import Backoff, ChildProcess
from bireme.config import CHECKOUT
from bireme.errors import ConfigError
from bireme.launch import processes
from bireme.launch.console import Console
from bireme.launch.doors import INTERVAL_S, Door, ask_http
from bireme.launch.guarded_thread import GuardedThread, GuardedThreads
from bireme.launch.process_watch import LOOK_S, ProcessWatch
from bireme.launch.tritonserver import address

_MODULES = ("uvicorn", "uvloop", "httptools")
_START_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_STEADY_S = 60.0  # after so long a life the pause is short again
_STALL_S = 60.0  # without a sign of life, even if it uses CPU
_GRACE_S = 5.0  # beyond the drain, before the process is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    recipe: str  # folder
    grpc: str  # host:port of the tritonserver
    port: int
    host: str = "127.0.0.1"
    drain_timeout_s: int = 30
    tls: tuple[str, str] | None = None  # files with its certificate and key; None: it speaks http
    arguments: tuple[str, ...] = ()  # further options of python -m bireme.openai
    environment: Mapping[str, str] = field(default_factory=dict)
    shm_prefix: str = ""  # of the launch, for the pulses of its processes; empty: they show none


class FrontendProcess:
    """Runs until `stop`; a context manager."""

    def __init__(self, settings: FrontendSettings, console: Console, threads: GuardedThreads | None = None) -> None:
        """`threads`: the launch's."""
        self._settings, self._console = settings, console
        self._threads = threads or GuardedThreads(console)
        self._keeper: GuardedThread | None = None
        self._caller: GuardedThread | None = None
        self._stopping = threading.Event()
        self._process: ChildProcess | None = None
        self._began_at = self._start_at = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._answers_before = 0  # of this life
        self.key = secrets.token_hex(32)  # the frontend takes it from us where it asks for keys
        self.door = Door("openai", ask_http(self.address, "/health/live", self.has_tls))
        self._watch = ProcessWatch(self.roles, self._end, settings.shm_prefix, _STALL_S)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the frontend was not started"
        return self._process.pid

    @property
    def address(self) -> str:
        return address(self._settings.host, self._settings.port)

    @property
    def has_tls(self) -> bool:
        return self._settings.tls is not None

    @property
    def url(self) -> str:
        return f"{'https' if self.has_tls else 'http'}://{self.address}/v1"

    def roles(self) -> dict[str, int]:
        """Return role -> pid: frontend, and frontend1, ... of its own processes."""
        pids = [self.pid, *processes.descendants(self.pid)]
        return {f"frontend{number or ''}": pid for number, pid in enumerate(pids)}

    @property
    def problem(self) -> str:
        """Why its port is not fully served."""
        members = self._watch.problems()
        hanging = [problem for problem in members.values() if "has ended" not in problem]
        if hanging:  # its share of the connections hangs
            return hanging[0]
        if len(members) == self._watch.num_processes:
            return next(iter(members.values()), self.door.problem)
        return self.door.problem

    def problems(self) -> dict[str, str]:
        return self._watch.problems()

    def start(self) -> None:
        """Return when it answers. Raises ConfigError when it ends instead."""
        self.spawn()
        self.wait_ready()

    def spawn(self) -> None:
        """`wait_ready` follows. Raises ConfigError."""
        try:
            self._process = self._spawn()
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"the OpenAI frontend can't be started: {error}") from error
        self._began_at = time.monotonic()

    def wait_ready(self) -> None:
        """As `start`; then it is kept alive."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            self.door.turn()
            if self.door.answers:
                break
            assert self._process is not None
            has_ended = self._process.exit_code is not None or time.monotonic() > deadline
            if self._stopping.is_set() or has_ended:
                self.stop()
                raise ConfigError("the OpenAI frontend did not start; its own message is above")
            time.sleep(0.05)
        self._console.event("frontend_ready", url=self.url, pid=self.pid)
        self._keeper = self._threads.start("frontend", self._keep, LOOK_S)
        self._caller = self._threads.start("frontend-door", self.door.turn, INTERVAL_S)

    def stop(self) -> None:
        """Let requests end, then end it. Harmless when repeated."""
        self._stopping.set()
        for thread in filter(None, (self._keeper, self._caller)):
            thread.stop()
        self._watch.close()
        process = self._process
        if process is None:
            return
        process.signal(signal.SIGTERM)
        if not process.wait(self._settings.drain_timeout_s + _GRACE_S):
            self._console.event("frontend_killed", "warning", drain_timeout_s=self._settings.drain_timeout_s)
        process.reap()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> FrontendProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _keep(self) -> None:
        """One turn: start it again, or see whether it hangs."""
        assert self._process is not None
        now = time.monotonic()
        if (code := self._process.exit_code) is None:
            self._watch.turn()
            if self.door.answers == self._answers_before and now - self._began_at > _START_TIMEOUT_S:
                self._end("frontend", self.pid, f"it has not answered within {_START_TIMEOUT_S:g} s of its start")
            return
        if not self._start_at:
            if now - self._began_at > _STEADY_S:
                self._backoff.reset()
            pause_s = self._backoff.next_s()
            self._start_at = now + pause_s
            self._console.event("frontend_died", "error", code=code, restart_in_s=pause_s)
        if now >= self._start_at:
            self._answers_before = self.door.answers
            self._process = self._spawn()  # no descriptor, process or memory left: the next turn tries again
            self._began_at, self._start_at = now, 0.0
            self._console.event("frontend_restarted", "warning", pid=self.pid)

    def _end(self, role: str, pid: int, cause: str) -> None:
        self._console.event("frontend_process_killed", "error", role=role, pid=pid, cause=cause)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _spawn(self) -> ChildProcess:
        settings = self._settings
        command = [
            sys.executable, "-m", "bireme.openai", "--recipe", settings.recipe, "--grpc", settings.grpc,
            "--host", settings.host, "--port", str(settings.port),
            "--drain-timeout", str(settings.drain_timeout_s), "--parent", str(os.getpid()), *settings.arguments,
        ]  # fmt: skip
        if settings.tls is not None:
            command += ["--tls-cert", settings.tls[0], "--tls-key", settings.tls[1]]
        path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))))
        own = {"PYTHONPATH": path, "BIREME_SHM_PREFIX": settings.shm_prefix, "BIREME_CANARY_KEY": self.key}
        environment = os.environ | own | dict(settings.environment)
        process = ChildProcess(command, environment, output=subprocess.PIPE)
        try:
            threading.Thread(target=self._relay, args=(process,), name="frontend-lines", daemon=True).start()
        except RuntimeError:  # no thread left: nobody would have it
            process.signal(signal.SIGKILL)
            process.reap()
            raise
        return process

    def _relay(self, process: ChildProcess) -> None:
        assert process.lines is not None
        with process.lines as lines:
            for line in lines:
                self._console.triton_line(line.rstrip("\n"))


def check_frontend() -> None:
    """Raise ConfigError when packages are missing."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the OpenAI frontend needs {', '.join(missing)}: pip install -e .[openai], or serve with --openai-port 0"
        )
