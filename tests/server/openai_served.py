"""A deployment of tiny-chat with its OpenAI frontend, served by tools/serve.py as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bireme.launch.ports import free_port

T = TypeVar("T")
LIMIT_S = 180
PUBLISHED_S = 1.0


def five_ports() -> dict[str, int]:
    """Return the name of each port of a launch -> one that is free now."""
    return {name: free_port() for name in ("http", "grpc", "metrics", "health", "openai")}


PORTS = five_ports()
URL = f"http://127.0.0.1:{PORTS['openai']}"


class Served:
    """The running launch."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ports: dict[str, int]) -> None:
        self.process, self.log, self.config = process, log, log.with_name("config.json")
        self.url = f"http://127.0.0.1:{ports['openai']}"

    def frontend_pid(self) -> int | None:
        """Return the process that serves now, not the one that the launch began with; None between two."""
        from bireme.launch import processes

        tree = processes.children(self.process.pid)
        return next((pid for pid in tree if "bireme.openai" in processes.command_line(pid)), None)


@contextlib.contextmanager
def served(recipe: str, log: Path, *arguments: str, ports: dict[str, int] = PORTS) -> Iterator[Served]:
    options = [f"--{name}-port={port}" for name, port in ports.items()]
    command = [sys.executable, "tools/serve.py", recipe, *options, "--canary-interval=0", *arguments]
    command += ["--dump-config-to", str(log.with_name("config.json"))]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + LIMIT_S
        while "frontend_ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield Served(process, log, ports)
    finally:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)  # the second one: at once (an orderly end takes seconds, and has its tests)
        process.wait(LIMIT_S)


def call(path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return status and JSON of a request; bytes go as they are."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, _json(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, _json(error.read())


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny-chat", "messages": [{"role": "user", "content": text}], **fields}


def series(name: str, port: int = PORTS["metrics"]) -> list[float]:
    """Return the values of a metric on tritonserver's page; none: nobody has published it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")]


def gauge(name: str, port: int = PORTS["metrics"]) -> float:
    """Return the sum of a metric over tritonserver's page."""
    return sum(series(name, port))


def settled(name: str, port: int = PORTS["metrics"]) -> float:
    """Return the sum of a metric once all that has happened is published: it stays as it is."""
    before = None
    while (now := gauge(name, port)) != before:
        before = now
        time.sleep(PUBLISHED_S)
    return now


def wait_for(condition: Callable[[], T], limit_s: float = 150) -> T:
    """Return what the condition answered when it was first true."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


def engine_of(served: Served, model: str = "decode") -> int:
    from bireme.launch import processes

    tree = processes.children(served.process.pid)
    server = next(pid for pid in tree if "tritonserver" in str(processes.command_line(pid)))
    return processes.engines(processes.stubs(server)[model][0])[0]


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
