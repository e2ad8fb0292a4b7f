"""One of the threads that send responses, with its queues.

A stream's first and last response go before the others' middle ones: a client waits for its first token and, to go on,
for its last, while tokens in between are merged as long as they wait. After each batch of urgent streams one of the
others has its turn, so the middle never starves.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from bireme.coalescing import BUSY_TURN, LONGEST_PAUSE_S, PAUSE_PER_TURN, SENDER_BURST_PAUSE_S
from bireme.triton.streams import Stream

logger = logging.getLogger("bireme.triton")


class Sender:
    """Flushes the streams that are put into it, each on this thread alone."""

    def __init__(self, name: str, is_burst: Callable[[], bool]) -> None:
        """`is_burst`: whether many requests start right now."""
        self._urgent: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()  # None: look at the others
        self._others: deque[Stream] = deque()
        self._is_waiting = False  # for either
        self._stops = False
        self._is_burst = is_burst
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, stream: Stream) -> None:
        """Have `stream` flushed. Any thread; never waits."""
        if stream.is_urgent:
            self._urgent.put(stream)
            return
        self._others.append(stream)
        if self._is_waiting:
            self._is_waiting = False
            self._urgent.put(None)

    def stop(self) -> None:
        self._stops = True
        self._urgent.put(None)

    def join(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stops or self._others or not self._urgent.empty():
            if not self._others:
                self._is_waiting = True
                if not self._others:  # else one came before this thread was seen to wait
                    self._flush_next(timeout_s=None)
                self._is_waiting = False
            self._pause(*self._turn())

    def _turn(self) -> tuple[int, float]:
        """Flush all that is there; return the number of streams and the time it took."""
        began_at = time.monotonic()
        count = len(self._others)
        for _ in range(count):
            self._flush_urgent()
            _flush(self._others.popleft())
        self._flush_urgent()
        return count, time.monotonic() - began_at

    def _pause(self, count: int, turn_s: float) -> None:
        """Let the others' tokens wait for a while; urgent ones go out."""
        pause_s = pause_after(count, turn_s, self._is_burst())
        ends_at = time.monotonic() + pause_s
        while pause_s > 0 and not self._stops:
            self._flush_next(pause_s)
            pause_s = ends_at - time.monotonic()

    def _flush_urgent(self) -> None:
        """Flush what is urgent now; what becomes urgent meanwhile waits for one turn of the others."""
        for _ in range(self._urgent.qsize()):
            self._flush_next(timeout_s=0.0)

    def _flush_next(self, timeout_s: float | None) -> None:
        """Flush the next urgent stream, or return when the others are to be looked at. None: no limit."""
        try:
            stream = self._urgent.get(timeout=timeout_s) if timeout_s != 0.0 else self._urgent.get_nowait()
        except queue.Empty:
            return
        if stream is not None:
            _flush(stream)


def pause_after(count: int, turn_s: float, is_burst: bool) -> float:
    """Return seconds, after a turn of `count` streams that are not urgent."""
    if is_burst:
        return SENDER_BURST_PAUSE_S if count else 0.0
    return min(LONGEST_PAUSE_S, PAUSE_PER_TURN * turn_s) if count >= BUSY_TURN else 0.0


def _flush(stream: Stream) -> None:
    try:
        stream.flush()
    except BaseException:  # flush raises nothing; should it, the thread's other streams go on
        logger.exception("flush_failed")
