"""A real etcd of one member, as a process that can be killed and started again with its data."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from bireme.launch import free_port

START_S = 60.0


class EtcdServer:
    """Serves from `start` to `kill`; a context manager. The ports stay the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "etcd"
        self.log = folder / "etcd.log"
        self._client, self._peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return self._client

    @property
    def address(self) -> str:
        """What --discovery takes."""
        return "etcd://" + self._client.removeprefix("http://")

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Return once it answers. Raises RuntimeError with its log."""
        command = [
            "etcd", "--data-dir", str(self._folder), "--log-level", "error",
            "--logger", "zap",  # 3.4 has another one, with which a slow read is a nil pointer
            "--listen-client-urls", self._client, "--advertise-client-urls", self._client,
            "--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer,
            "--initial-cluster", f"default={self._peer}",
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"etcd did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once; its data stays."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._client}/health", timeout=1) as reply:
                return b'"true"' in reply.read()
        except OSError:
            return False
