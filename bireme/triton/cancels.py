"""Finds out which clients are gone, for all streams of a stub, on one thread.

Triton does not report a cancellation: it must be asked, 30-60 us a question. A stream is asked every 100 ms, at most
MAX_POLLS streams a turn, so that the poller never takes a core: up to 128 streams every 100 ms, 256 every 200 ms.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from bireme.triton.streams import Stream

PERIOD_S = 0.1  # between two questions about one stream
TURN_S = 0.025
MAX_POLLS = 32  # a turn
logger = logging.getLogger("bireme.triton")


class CancelPoller:
    def __init__(self) -> None:
        self._due: deque[tuple[float, Stream]] = deque()  # by time: every stream waits the same period
        self._wakes = threading.Event()
        self._stops = False
        self._num_cancelled = 0  # found so far; written by the poller's thread
        self._num_taken = 0
        self._thread = threading.Thread(target=self._run, name="cancel-poller", daemon=True)
        self._thread.start()

    def watch(self, stream: Stream) -> None:
        """Poll `stream` until its final flag is out or its client is gone. Thread-safe."""
        self._due.append((time.monotonic() + PERIOD_S, stream))
        if not self._wakes.is_set():
            self._wakes.set()

    def take_num_cancelled(self) -> int:
        """Return how many clients were found gone since the last call, of the only caller."""
        found = self._num_cancelled
        taken, self._num_taken = self._num_taken, found
        return found - taken

    def stop(self, limit_s: float) -> None:
        self._stops = True
        self._wakes.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        while not self._stops:
            if not self._due:
                self._wakes.clear()
                if not self._due and not self._stops:  # a watch() between the two would be missed
                    self._wakes.wait()
                continue
            time.sleep(max(TURN_S, min(PERIOD_S, self._due[0][0] - time.monotonic())))
            self._turn(time.monotonic())

    def _turn(self, now: float) -> None:
        for _ in range(min(MAX_POLLS, len(self._due))):
            if self._stops or self._due[0][0] > now:
                return
            _, stream = self._due.popleft()
            if stream.is_closed:
                continue
            try:
                goes_on = stream.poll()
                self._num_cancelled += bool(stream.cancelled)
            except Exception:
                logger.exception("poll_failed")
                continue
            if goes_on:
                self._due.append((now + PERIOD_S, stream))
