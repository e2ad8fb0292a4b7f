"""The stub's side: jobs wait in a queue, one thread hands them to the child and keeps it alive.

The child starts with the first job and ends after a while without any: a deployment that never uses the model pays
nothing for it. The thread forks the child, because the child's death signal follows the thread. A job that kills or
hangs the child fails alone; the next one gets a new child, with the back-off of every engine.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from bireme.child_process import ChildProcess, describe_exit
from bireme.config import Recipe
from bireme.engines.logits import frames
from bireme.engines.stub.environment import child_environment, find_python
from bireme.engines.stub.supervisor import restart_backoff
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    EngineLostError,
    ResourceExhaustedError,
    UnavailableError,
    from_message,
)

if TYPE_CHECKING:
    from bireme.logits.application import LogitsJob

_NUM_THREADS = 1  # passes over one row: memory-bound
_IDLE_S = 300.0
_JOIN_S = 3.0
_STOPPED = "logits_processor is shutting down"


class LogitsClient:
    """Make it, `submit`, `stop`."""

    def __init__(self, recipe: Recipe, logger: logging.Logger, idle_s: float = _IDLE_S) -> None:
        self._config = recipe.supervisor
        self._max_jobs = recipe.limits.max_concurrent_requests
        self._max_bytes = 4 * recipe.limits.max_logits_bytes
        self._logger = logger
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[tuple[LogitsJob, Future[bytes]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._num_jobs = self._num_bytes = 0
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._child: _Child | None = None
        self._backoff = restart_backoff(self._config)
        self._has_crashed = False
        self._stop = threading.Event()

    @property
    def pid(self) -> int:
        """Return the child's process id; 0: none runs now."""
        child = self._child
        return child.process.pid if child else 0

    def submit(self, job: LogitsJob) -> Future[bytes]:
        """The future gives float32 bytes or an error of ours. Raises ResourceExhaustedError."""
        future: Future[bytes] = Future()
        with self._lock:
            if self._is_stopped:
                raise UnavailableError(_STOPPED)
            if self._num_jobs >= self._max_jobs or self._num_bytes + len(job.logits) > self._max_bytes:
                waiting = f"{self._num_jobs} jobs with {self._num_bytes} bytes"
                raise ResourceExhaustedError(f"logits_processor has {waiting} waiting; try again")
            self._num_jobs += 1
            self._num_bytes += len(job.logits)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="logits-child", daemon=True)
                self._thread.start()
        future.add_done_callback(lambda _: self._forget(len(job.logits)))
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        """What waits ends with UNAVAILABLE. May be called again."""
        with self._lock:
            self._is_stopped = True
            thread = self._thread
        self._stop.set()
        self._jobs.put(None)
        child = self._child
        if child is not None:
            child.process.kill()
        if thread is not None:
            thread.join(_JOIN_S)

    def _forget(self, num_bytes: int) -> None:
        with self._lock:
            self._num_jobs -= 1
            self._num_bytes -= num_bytes

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                item = self._jobs.get(timeout=self._idle_s if self._child else None)
            except queue.Empty:
                self._end_child("idle")
                continue
            if item is not None:
                self._serve(*item)
        self._end_child("stop")
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        while True:
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(UnavailableError(_STOPPED))

    def _serve(self, job: LogitsJob, future: Future[bytes]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = self._exchange(job)
        except BiremeError as error:
            future.set_exception(error)
        except Exception as error:
            self._logger.exception("logits_job_failed")
            self._end_child("failed")
            future.set_exception(BiremeError(f"logits_processor: {type(error).__name__}"))
        else:
            future.set_result(result)

    def _exchange(self, job: LogitsJob) -> bytes:
        """Raises errors.py; after a missing answer the child is gone."""
        if self._stop.is_set():
            raise UnavailableError(_STOPPED)
        child = self._child or self._start_child()
        try:
            answer = child.ask(job, self._config.stall_timeout_s)
        except TimeoutError:
            self._has_crashed = True
            self._end_child("hang")
            limit = self._config.stall_timeout_s
            raise DeadlineExceededError(
                f"the logits processors took longer than {limit:g} s (supervisor.stall_timeout_s)"
            ) from None
        except (EOFError, OSError):
            self._has_crashed = True
            how = self._end_child("crash")
            raise EngineLostError(f"the process of the logits processors ended ({how}); try again") from None
        if answer.error:
            raise from_message(answer.error)
        return answer.logits

    def _start_child(self) -> _Child:
        if self._has_crashed:
            self._wait_for_restart()
        self._has_crashed = True  # until it has said hello
        began = time.monotonic()
        try:
            self._child = child = _Child()
            if self._stop.is_set():  # stop() may have looked for a child before there was one
                child.process.kill()
            answer = child.hello(self._config.start_timeout_s)
        except (EOFError, OSError):
            how = self._end_child("start")
            raise UnavailableError(f"the process of the logits processors did not start ({how}); try again") from None
        if answer.error:
            self._end_child("start")
            raise from_message(answer.error)
        self._has_crashed = False
        self._logger.info("logits_child_ready pid=%d load_s=%.2f", child.process.pid, time.monotonic() - began)
        return child

    def _wait_for_restart(self) -> None:
        delay_s = self._backoff.next_s()
        if delay_s == math.inf:
            config = self._config
            raise UnavailableError(
                f"the process of the logits processors ended {config.max_restarts} times in"
                f" {config.restart_window_s:g} s and stays down; see the log for the cause"
            )
        self._stop.wait(delay_s)

    def _end_child(self, cause: str) -> str:
        child, self._child = self._child, None
        if child is None:
            return "it was not running"
        how = child.end()
        self._logger.info("logits_child_ended cause=%s how=%r", cause, how)
        return how


class _Child:
    """Made and used by the client's thread, killed from any."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        command = [find_python(), "-m", "bireme.engines.logits.worker"]
        command += ["--socket", str(theirs.fileno()), "--parent", str(os.getpid())]
        environment = child_environment(_NUM_THREADS) | {"CUDA_VISIBLE_DEVICES": ""}
        try:
            self.process = ChildProcess(command, environment, pass_fds=[theirs.fileno()])
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()

    def hello(self, timeout_s: float) -> frames.LogitsReply:
        self._channel.settimeout(timeout_s)
        return frames.receive_answer(self._channel)

    def ask(self, job: LogitsJob, timeout_s: float) -> frames.LogitsReply:
        self._channel.settimeout(timeout_s)
        frames.send(self._channel, job)
        return frames.receive_answer(self._channel)

    def end(self) -> str:
        """A child that has ended already keeps its own exit status."""
        self._channel.close()
        self.process.wait(0.2)
        return describe_exit(self.process.reap())
