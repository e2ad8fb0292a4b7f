"""One life of an engine process, from its start to its end: its sockets, the process, and the removal of what it
leaves.

Each life has sockets of its own, so that nothing stale outlives it; a killed stub's are removed with the next life. The
stub binds both before it starts the child. All methods but `send` belong to the supervisor's thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from bireme import own_work
from bireme.child_process import ChildProcess, describe_exit
from bireme.discovery import run_folder
from bireme.errors import ConfigError, NotFoundError, UnavailableError
from bireme.kv import transfer
from bireme.multimodal.embedding_share import SUFFIX
from bireme.own_work import WorkFile

logger = logging.getLogger("bireme.engines")
_MAX_SOCKET_PATH = 107  # bytes of sun_path, less the final zero
_EXIT_POLL_S = 0.02  # where the kernel has no pidfd


class Standby:
    """It has loaded its libraries and waits for a life to begin (child/standby.py)."""

    def __init__(self, worker: str, python: str, environment: dict[str, str]) -> None:
        """Raises OSError."""
        reads, self._writes = os.pipe()
        command = [python, "-m", "bireme.engines.worker", "--worker", worker, "--standby", str(reads)]
        try:
            self.process = ChildProcess([*command, "--parent", str(os.getpid())], environment, pass_fds=(reads,))
        except OSError:
            os.close(self._writes)
            raise
        finally:
            os.close(reads)

    def begin(self, endpoint: str, life: int) -> bool:
        """False: it has ended."""
        try:
            if not self.process.has_exited:
                os.write(self._writes, f"{endpoint} {life}".encode())
                return True
        except OSError:  # it has just ended
            pass
        finally:
            os.close(self._writes)
        self.process.reap()
        return False

    def end(self) -> None:
        os.close(self._writes)
        self.process.reap()


class Life:
    """From `spawn` to `end`."""

    def __init__(self, worker: str, number: int, run_dir: Path) -> None:
        self.worker = worker
        self.number = number
        self.began_at = time.monotonic()
        self.process: ChildProcess | None = None
        self._run_dir = run_dir
        self._own_folder: Path | None = None
        self._context = zmq.Context()
        self._send_lock = threading.Lock()
        self._is_open = True
        self._pidfd = -1
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been deleted
        self._sweep()
        self._path = self._socket_path()
        self._commands = self._bind(zmq.PUSH, ".c")
        self._frames = self._bind(zmq.PULL, ".s")
        self.work = WorkFile(Path(self._path + own_work.SUFFIX))
        self._poller = zmq.Poller()
        self._poller.register(self._frames, zmq.POLLIN)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def spawn(self, python: str, environment: dict[str, str], standby: Standby | None = None) -> ChildProcess:
        """Or have one that waits begin. Raises ConfigError when the python can't be run."""
        endpoint = f"ipc://{self._path}"
        if standby is not None and standby.begin(endpoint, self.number):
            self.process = standby.process
        else:
            command = [python, "-m", "bireme.engines.worker", "--worker", self.worker, "--endpoint", endpoint]
            command += ["--life", str(self.number), "--parent", str(os.getpid())]
            try:
                self.process = ChildProcess(command, environment)
            except OSError as error:
                raise ConfigError(
                    f"engine process: {python} can't be run: {error}; set BIREME_ENGINE_PYTHON"
                ) from error
        with contextlib.suppress(OSError, AttributeError):  # kernels before 5.3, or forbidden in a container
            self._pidfd = os.pidfd_open(self.process.pid)
            self._poller.register(self._pidfd, zmq.POLLIN)
        return self.process

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.signal(number)

    def send(self, data: bytes) -> None:
        """From any thread. Raises UnavailableError when the child is not connected."""
        with self._send_lock:
            if not self._is_open:
                raise UnavailableError(f"engine life {self.number} of {self.worker} has ended")
            try:
                self._commands.send(data, zmq.NOBLOCK)
            except zmq.Again:
                raise UnavailableError(f"the engine process of {self.worker} is not connected") from None

    def wait(self, timeout_s: float) -> None:
        """Sleep until a frame is there, the child has ended, or the time is over."""
        if self._pidfd < 0:
            timeout_s = min(timeout_s, _EXIT_POLL_S)
        self._poller.poll(max(0, int(timeout_s * 1000)))

    def frames(self, limit: int = 1 << 62) -> Iterator[bytes]:
        for _ in range(limit):
            try:
                data: bytes = self._frames.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield data

    def last_frames(self, timeout_s: float) -> Iterator[bytes]:
        """Return what the ended child has sent; its first may still have to be handed on by ZeroMQ's thread."""
        self._frames.poll(int(timeout_s * 1000))
        yield from self.frames()

    def end(self) -> str:
        """Return how the child ended; what it left is removed."""
        how = describe_exit(self.process.reap()) if self.process else "it was never started"
        with self._send_lock:
            self._is_open = False
        self._commands.close(0)
        self._frames.close(0)
        self._context.term()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self.work.close()
        self._sweep()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
        with contextlib.suppress(NotFoundError):
            if run_folder.find(self._run_dir, self.worker).life == self.number:
                run_folder.withdraw(self._run_dir, self.worker)
        run_folder.withdraw(self._run_dir, self.worker + SUFFIX)
        return how

    def _bind(self, kind: int, suffix: str) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(f"ipc://{self._path}{suffix}")
        return socket

    def _socket_path(self) -> str:
        """Return both sockets' prefix, in a folder that only this user can enter."""
        path = str(self._run_dir / f"{self.worker}-{self.number}")
        if len(os.fsencode(path)) + 2 <= _MAX_SOCKET_PATH:
            return path
        self._own_folder = Path(tempfile.mkdtemp(prefix="bireme-", dir="/tmp"))
        return str(self._own_folder / "engine")

    def _sweep(self) -> None:
        """Also those of killed stubs."""
        for socket in self._run_dir.glob(f"{self.worker}-*.[celrsw]"):
            socket.unlink(missing_ok=True)
        if count := transfer.sweep(self._run_dir, self.worker):
            logger.info("shm_swept worker=%s files=%d", self.worker, count)
