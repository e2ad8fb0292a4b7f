"""A frontend in a process of its own, with no tritonserver behind it."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bireme.launch.doors import connect
from bireme.launch.ports import free_port

LIMIT_S = 120
_WITHOUT_COLLECTOR = "import gc, sys; gc.disable(); from bireme.openai.__main__ import main; sys.exit(main())"


class FrontendServer:
    """Runs on `port`; what it logs is in `log`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, has_tls: bool = False) -> None:
        self.process, self.port, self.log, self._has_tls = process, port, log, has_tls

    def connect(self) -> http.client.HTTPConnection:
        return connect(f"127.0.0.1:{self.port}", LIMIT_S, self._has_tls)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Return status and JSON; bytes go as they are."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        with contextlib.closing(self.connect()) as connection:
            with contextlib.suppress(BrokenPipeError):  # refused before it was heard out
                connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())

    def has_begun(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.call("GET", "/health/live")[0] == 200

    def wait_for_requests(self, count: int) -> None:
        """Wait until so many are under way beside the one that asks."""
        series = f'bireme_http_requests_active{{worker="frontend"}} {count + 1:.1f}'
        wait_for(lambda: series in self.page())

    def page(self) -> str:
        """Return what /metrics shows."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) << 10


def wait_for(condition: Any, limit_s: float = LIMIT_S) -> Any:
    """Return the first true value; OSError counts as not yet."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            if found := condition():
                return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def frontend_server(
    folder: Path,
    *options: str,
    recipe: str = "recipes/tiny-chat",
    grpc: str = "127.0.0.1:1",
    collector: bool = True,
    has_tls: bool = False,
    runner: Sequence[str] = (),
) -> Iterator[FrontendServer]:
    """`grpc`: nobody listens on port 1. `runner`: becomes the program after it. Killed at the end, if it still runs."""
    port, log = free_port(), folder / "frontend.log"
    program = ["-m", "bireme.openai"] if collector else ["-c", _WITHOUT_COLLECTOR]
    command = [*runner, sys.executable, *program, "--recipe", recipe, "--grpc", grpc, "--port", str(port), *options]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    server = FrontendServer(process, port, log, has_tls)
    try:
        wait_for(server.has_begun)
        yield server
    finally:
        process.kill()
        process.wait()
