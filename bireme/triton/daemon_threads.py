"""A pool of threads that never keeps the process from exiting, and replaces those whose call never returns.

concurrent.futures joins its threads when the interpreter ends: one call that waits for a dead model would keep the stub
from exiting, and Triton waits for that exit without a limit.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

LOST_S = 10.0  # a call that has not returned so long after its caller left
_Future = concurrent.futures.Future[Any]
_Work = tuple[_Future, Callable[..., Any], tuple[Any, ...]]


class DaemonThreads(concurrent.futures.Executor):
    """At most `max_threads` daemon threads, started when needed; further calls wait in order.

    A call that its caller has left (`leave`) and that does not return within LOST_S is lost, with its thread. Up to
    `num_spares` others take the place of lost ones; should a lost call return after all, there is one thread fewer.
    """

    def __init__(self, max_threads: int, name: str, num_spares: int = 0) -> None:
        self.max_threads, self.num_spares = max_threads, num_spares
        self._name = name
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_open = 0  # calls waiting or under way
        self._left: dict[_Future, float] = {}  # under way, nobody waits for them: since when
        self._is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> _Future:
        """Run fn(*args) on a thread. Raises RuntimeError after shutdown."""
        assert not kwargs, "positional arguments only"
        future: _Future = concurrent.futures.Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: the pool is shut down")
            self._num_open += 1
            self._queue.put((future, fn, args))
            self._start_missing()
        return future

    def leave(self, future: _Future) -> None:
        """Nobody waits for the call any more."""
        with self._lock:
            if future.running():
                self._left[future] = time.monotonic()

    def count_lost(self) -> int:
        """Return the number of lost threads, and start what may take their place. To be called now and then."""
        with self._lock:
            self._start_missing()
            return self._num_lost()

    def refuse_waiting(self, error: Exception) -> None:
        """End the calls that no thread has begun."""
        for future in self._take_waiting():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel what waits; running calls go on, and nobody waits for them."""
        with self._lock:
            self._is_closed = True
        for future in self._take_waiting() if cancel_futures else ():
            future.cancel()
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _take_waiting(self) -> list[_Future]:
        taken: list[_Future] = []
        with self._lock, contextlib.suppress(queue.Empty):
            while (work := self._queue.get_nowait()) is not None:
                taken.append(work[0])
                self._num_open -= 1
        return taken

    def _num_lost(self) -> int:
        lost_before = time.monotonic() - LOST_S
        return sum(left_at <= lost_before for left_at in self._left.values())

    def _most_threads(self) -> int:
        return self.max_threads + min(self._num_lost(), self.num_spares)

    def _start_missing(self) -> None:
        while not self._is_closed and self._num_threads < min(self._num_open, self._most_threads()):
            self._num_threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

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
                self._left.pop(future, None)
                if self._num_threads > self._most_threads():  # it was lost, and has been replaced
                    self._num_threads -= 1
                    return
