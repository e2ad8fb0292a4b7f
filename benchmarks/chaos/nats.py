"""A real nats-server, as a process that can be killed and started again."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from bireme.launch import free_port

START_S = 60.0


class NatsProcess:
    """Serves from `start` to `kill`. The port stays the same."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self.log = folder / "nats.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Return once it takes connections. Raises RuntimeError with its log."""
        with self.log.open("ab") as log:
            command = ["nats-server", "-a", "127.0.0.1", "-p", str(self._port)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not self._takes_connections():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"nats-server did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _takes_connections(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True
