"""A pool of threads that never keeps the process from exiting.

concurrent.futures joins its threads when the interpreter ends: one call that waits for a dead model would keep the stub
from exiting, and Triton waits for that exit without a limit.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

_Work = tuple[concurrent.futures.Future[Any], Callable[..., Any], tuple[Any, ...]]


class DaemonThreads(concurrent.futures.Executor):
    """At most `max_threads` daemon threads, started when needed; further calls wait in order."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_open = 0  # calls waiting or under way
        self._is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Run fn(*args) on a thread. Raises RuntimeError after shutdown."""
        assert not kwargs, "positional arguments only"
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: the pool is shut down")
            self._num_open += 1
            needs_thread = self._num_threads < min(self._num_open, self._max_threads)
            self._num_threads += needs_thread
        self._queue.put((future, fn, args))
        if needs_thread:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel what waits; running calls go on, and nobody waits for them."""
        with self._lock:
            self._is_closed = True
        while cancel_futures:
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                break
            if work is not None:
                work[0].cancel()
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            future, function, arguments = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            with self._lock:
                self._num_open -= 1
