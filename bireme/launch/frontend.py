"""The OpenAI frontend of a launch: a process of its own, started again when it dies, drained first at the end.

with deployment, FrontendProcess(settings, console):
    deployment.supervise()
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from bireme.config import CHECKOUT
from bireme.errors import ConfigError
from bireme.launch import processes
from bireme.launch.console import Console
from bireme.launch.ports import is_free
from bireme.launch.tritonserver import address

_MODULES = ("uvicorn", "uvloop", "httptools")
_START_TIMEOUT_S = 60.0
_LONGEST_PAUSE_S = 10.0
_GRACE_S = 5.0  # beyond the drain, before the process is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    recipe: str  # folder
    grpc: str  # host:port of the tritonserver
    port: int
    host: str = "127.0.0.1"
    drain_timeout_s: int = 30
    arguments: tuple[str, ...] = ()  # further options of python -m bireme.openai
    environment: Mapping[str, str] = field(default_factory=dict)


class FrontendProcess:
    """Runs until `stop`; a context manager."""

    def __init__(self, settings: FrontendSettings, console: Console) -> None:
        self._settings, self._console = settings, console
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._keep, name="frontend", daemon=True)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the frontend was not started"
        return self._process.pid

    def roles(self) -> dict[str, int]:
        """Return role -> pid: frontend, and frontend1, ... where it has processes of its own."""
        pids = [self.pid, *processes.descendants(self.pid)]
        return {f"frontend{number or ''}": pid for number, pid in enumerate(pids)}

    def start(self) -> None:
        """Start it and wait until it answers. Raises ConfigError when it ends instead."""
        self._process = self._spawn()
        if not self._await_answer():
            self.stop()
            raise ConfigError("the OpenAI frontend did not start; its own message is above")
        self._thread.start()

    def stop(self) -> None:
        """Let requests under way end, then end it. Harmless when called again."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(self._settings.drain_timeout_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            self._console.event("frontend_killed", "warning", drain_timeout_s=self._settings.drain_timeout_s)
            process.kill()
            process.wait()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> FrontendProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _address(self) -> str:
        return address(self._settings.host, self._settings.port)

    def _await_answer(self) -> bool:
        """Say when it answers; return False when it has ended, does not in time, or is not wanted any more."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline or self._stopping.wait(0.05):
                return False
        self._console.event("frontend_ready", url=f"http://{self._address}/v1", pid=self.pid)
        return True

    def _keep(self) -> None:
        """Start it again, after a pause that doubles, whenever it ends by itself."""
        pause_s = 0.25
        while True:
            assert self._process is not None
            began = time.monotonic()
            code = self._process.wait()
            if time.monotonic() - began > 60:
                pause_s = 0.25
            if self._stopping.is_set():
                return
            self._console.event("frontend_died", "error", code=code, restart_in_s=pause_s)
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._process = self._spawn()
            if self._stopping.is_set():  # `stop` saw the process before this one
                self._process.terminate()
            else:
                self._await_answer()

    def _spawn(self) -> subprocess.Popen[str]:
        settings = self._settings
        command = [
            sys.executable, "-m", "bireme.openai", "--recipe", settings.recipe, "--grpc", settings.grpc,
            "--host", settings.host, "--port", str(settings.port),
            "--drain-timeout", str(settings.drain_timeout_s), "--parent", str(os.getpid()), *settings.arguments,
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))))
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, **settings.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone
        )
        threading.Thread(target=self._relay, args=(process,), name="frontend-lines", daemon=True).start()
        return process

    def _relay(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._console.triton_line(line.rstrip("\n"))

    def _answers(self) -> bool:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.host, self._settings.host)
        connection = http.client.HTTPConnection(host, self._settings.port, timeout=1)
        try:
            connection.request("GET", "/health/live")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def check_frontend(port: int, host: str) -> None:
    """Raise ConfigError when a frontend could not start: packages are missing, or the port is taken."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the OpenAI frontend needs {', '.join(missing)}: pip install -e .[openai], or serve with --openai-port 0"
        )
    if not is_free(port, host):
        raise ConfigError(f"--openai-port: {port} is in use; choose another, or 0 to serve without the frontend")
