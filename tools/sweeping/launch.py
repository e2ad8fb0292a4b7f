"""One launch under test: serve.py as a user starts it, on loopback ports of its own, gated by its true readiness."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bireme import own_process
from bireme.config import CHECKOUT, Recipe
from bireme.launch import free_port
from tools.sweeping.loads import Target, environment
from tools.sweeping.matrix import Deployment

_POLL_S = 0.25
_TELL_S = 15.0
_DRAIN_S, _END_S, _KILL_S = 5, 60.0, 30.0
_ANSWER_S = 60.0  # for the first chat, and for a probe
_SMOKE_TOKENS = 4
_TOLD_LINES = 8  # of a log, in a reason


class LaunchFailedError(Exception):
    """A launch did not come up, or has died; the text says why."""


class StoppedError(Exception):
    """The sweep was told to stop."""


class Stop:
    """Set by a signal; whoever waits, waits here. A second signal is for those who wait for a launch to end."""

    def __init__(self) -> None:
        self._event, self._hurry = threading.Event(), threading.Event()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    @property
    def is_urgent(self) -> bool:
        return self._hurry.is_set()

    def set(self) -> None:
        (self._hurry if self._event.is_set() else self._event).set()

    def sleep(self, seconds: float) -> None:
        """Raises StoppedError."""
        if self._event.wait(seconds):
            raise StoppedError


class Wait:
    """Waits for one thing, and says now and then that it still does."""

    def __init__(self, stop: Stop, what: str, say: Callable[[str], None]) -> None:
        self._stop, self._what, self._say = stop, what, say
        self._began = self._told = time.monotonic()

    def pause(self) -> None:
        """Raises StoppedError."""
        now = time.monotonic()
        if now - self._told >= _TELL_S:
            self._told = now
            self._say(f"{self._what}: {now - self._began:.0f} s so far")
        self._stop.sleep(_POLL_S)


class Launch:
    """Made by `started`."""

    def __init__(self, process: subprocess.Popen[bytes], health: str, target: Target, log: Path, config: Path) -> None:
        self._process, self._health, self._config = process, health, config
        self.target, self.log = target, log

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        return not self.has_ended() and _get(self._health)[0] == 200

    def wait_ready(self, timeout_s: float, wait: Wait) -> None:
        """Raises LaunchFailedError, StoppedError."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if (status := self._process.poll()) is not None:
                raise LaunchFailedError(f"serve.py ended with {status} before it was ready: {last_lines(self.log)}")
            if time.monotonic() > deadline:
                raise LaunchFailedError(
                    f"not ready in {timeout_s:g} s ({_get(self._health)[1][:300]}); the log is {self.log}; give more"
                    " with ready_timeout_s"
                )
            wait.pause()

    def try_answer(self, is_chat: bool) -> None:
        """Ask for a few tokens as any client would. Raises LaunchFailedError."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]} if is_chat else {"prompt": "Hello"}
        body = asked | {"model": self.target.model, "max_tokens": _SMOKE_TOKENS, "ignore_eos": True}
        request = urllib.request.Request(  # noqa: S310  its own launch, by http on loopback
            f"{self.target.url}/v1/{'chat/' if is_chat else ''}completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        status, text = _open(request)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if status == 200 and json.loads(text)["usage"]["completion_tokens"] > 0:
                return
        raise LaunchFailedError(f"it is ready, but a first request was answered with {status}: {text[:300]}")

    def document(self) -> dict[str, Any]:
        """Return what serve.py says of this launch. Raises LaunchFailedError."""
        try:
            found: dict[str, Any] = json.loads(self._config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LaunchFailedError(f"serve.py has written no {self._config.name}: {error}") from error
        return found

    def end(self, stop: Stop) -> None:
        """Let it end in order, unless that takes too long or a second signal hurries; then not."""
        for number, patience_s in ((signal.SIGTERM, _END_S), (signal.SIGTERM, _KILL_S), (signal.SIGKILL, _KILL_S)):
            if self.has_ended():
                return
            self._process.send_signal(number)
            deadline, was_urgent = time.monotonic() + patience_s, stop.is_urgent
            while not self.has_ended() and time.monotonic() < deadline and stop.is_urgent == was_urgent:
                time.sleep(_POLL_S)


@contextlib.contextmanager
def started(
    deployment: Deployment, recipe: Recipe, settings: Sequence[str], folder: Path, stop: Stop
) -> Iterator[Launch]:
    """Start it and end it again; `folder`: for its log and configuration. Only the main thread may call this."""
    ports = {name: free_port() for name in ("http", "grpc", "metrics", "health", "openai")}
    log, config = folder / f"{deployment.slug}.log", folder / f"{deployment.slug}.config.json"
    config.unlink(missing_ok=True)
    # Ctrl-C of a terminal is for the sweep, which ends it then.
    serve = [sys.executable, str(CHECKOUT / "tools" / "serve.py"), recipe.folder, "--canary-interval", "0"]
    serve += [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    serve += ["--drain-timeout", str(_DRAIN_S), "--dump-config-to", str(config)]
    serve += [word for setting in settings for word in ("--set", setting)]
    variables = {name: value for name, value in os.environ.items() if name not in ("BIREME_RECIPE", "BIREME_OVERRIDE")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*_guard(), *serve], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, env=variables,
        )  # fmt: skip
    target = Target(f"http://127.0.0.1:{ports['openai']}", recipe.served_name, recipe.tokenizer_path)
    launch = Launch(process, f"http://127.0.0.1:{ports['health']}/health/ready", target, log, config)
    try:
        yield launch
    finally:
        launch.end(stop)


def run_load(command: Sequence[str], log: Path, timeout_s: float, has_died: Callable[[], bool], wait: Wait) -> str:
    """Run a program to its end and return its stdout; `log` gets the rest.

    `has_died`: the launch. Raises LaunchFailedError where it has, TimeoutError, StoppedError; or ChildProcessError.
    """
    deadline = time.monotonic() + timeout_s
    output = log.with_suffix(".out")
    with log.open("wb") as errors, output.open("wb") as stdout:
        process = subprocess.Popen(
            [*_guard(), *command], stdin=subprocess.DEVNULL, stdout=stdout, stderr=errors, start_new_session=True,
            cwd=CHECKOUT, env=environment(),
        )  # fmt: skip
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the load had not ended after {timeout_s:g} s; give more with cell_timeout_s")
                if has_died():
                    raise LaunchFailedError("serve.py ended under the load")
                wait.pause()
        finally:
            _kill_session(process)
    if process.returncode:
        raise ChildProcessError(f"the load ended with {process.returncode}: {last_lines(log) or last_lines(output)}")
    return output.read_text(encoding="utf-8", errors="replace")


def _guard() -> list[str]:
    """Return what starts a program that dies with this process, whatever happens to that."""
    return [sys.executable, "-I", "-S", str(own_process.__file__), str(os.getpid()), "free"]


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """End a load and the processes that it has started, also those that it has left; they are in its own session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: Path) -> str:
    """Return the end of a log: of its errors, if it has some."""
    try:
        lines = [
            line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
    except OSError:
        return ""
    errors = [line for line in lines if "error" in line.lower()]
    return " | ".join((errors or lines)[-_TOLD_LINES:])[:1500]


def _get(url: str) -> tuple[int, str]:
    return _open(urllib.request.Request(url))  # noqa: S310  its own launch, by http on loopback


def _open(request: urllib.request.Request) -> tuple[int, str]:
    """Return status and body; 0 and a reason where nobody answers."""
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:  # noqa: S310
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"nobody answers: {error}"
