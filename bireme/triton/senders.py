"""The only threads that send responses: a stream always goes to the same one, so its order is kept.

A send is a blocking round trip (90-180 us). While one is under way the streams' buffers fill, and the next
flush sends them merged; an idle sender sends at once. Four threads saturate the stub (measured), and would
take all the CPU that there is from the engine and from requests that start: hence the rests, after a long turn
and, while a burst of requests starts, after any.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

from bireme.triton.streams import Stream

NUM_SENDERS = 4
BUSY_TURN = 24  # streams flushed in one go; from here on a sender rests, and what comes meanwhile is merged
REST = 1.0  # of the time that the turn took
LONGEST_REST_S = 0.02
BURST_REST_S = 0.016
logger = logging.getLogger("bireme.triton")


class Senders:
    """A fixed set of sender threads with a queue each."""

    def __init__(self, num_threads: int = NUM_SENDERS) -> None:
        self._queues: list[queue.SimpleQueue[Stream | None]] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._next = itertools.cycle(self._queues)
        self._burst_ends_at = 0.0
        self._threads = [
            threading.Thread(target=self._run, args=(outbox,), name=f"sender-{i}", daemon=True)
            for i, outbox in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def assign(self) -> Callable[[Stream], None]:
        """Return the enqueue function of one sender, in turn."""
        return next(self._next).put

    def burst(self, seconds: float) -> None:
        """Requests start for so long from now: leave them the interpreter."""
        self._burst_ends_at = time.monotonic() + seconds

    def stop(self, limit_s: float) -> bool:
        """Let the threads send what is queued and end. Return False when one did not within the limit."""
        for outbox in self._queues:
            outbox.put(None)
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, outbox: queue.SimpleQueue[Stream | None]) -> None:
        while True:
            turn = [outbox.get()]
            began_at = time.monotonic()
            turn += [outbox.get() for _ in range(outbox.qsize())]
            for stream in turn:
                if stream is None:
                    return
                _flush(stream)
            now = time.monotonic()
            if now < self._burst_ends_at:
                time.sleep(BURST_REST_S)
            elif len(turn) >= BUSY_TURN:
                time.sleep(min(LONGEST_REST_S, REST * (now - began_at)))


def _flush(stream: Stream) -> None:
    try:
        stream.flush()
    except BaseException:  # flush raises nothing; should it, the other streams of this thread go on
        logger.exception("flush_failed")
