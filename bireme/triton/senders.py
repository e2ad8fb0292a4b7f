"""The only threads that send responses: a stream always goes to the same one, so its order is kept.

A send is a blocking round trip (90-180 us). Meanwhile the streams' buffers fill, and the next flush sends them merged;
an idle sender sends at once. Four threads saturate the stub (measured) and would take all CPU from the engine and from
starting requests. Hence the pauses (sender.py) after a long turn and, while a burst of requests starts, after any;
urgent responses do not wait for their end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from bireme.triton.sender import Sender
from bireme.triton.streams import Stream

NUM_SENDERS = 4


class Senders:
    def __init__(self, num_threads: int = NUM_SENDERS) -> None:
        self._burst_ends_at = 0.0
        self._senders = [Sender(f"sender-{i}", self._is_burst) for i in range(num_threads)]
        self._next = itertools.cycle(self._senders)

    def assign(self) -> Callable[[Stream], None]:
        """Return the enqueue function of one sender, in turn."""
        return next(self._next).put

    def burst(self, seconds: float) -> None:
        """Requests start for `seconds` from now: pause after every turn."""
        self._burst_ends_at = time.monotonic() + seconds

    def stop(self, limit_s: float) -> bool:
        """Send what is queued, then end the threads. Return False when one did not end within the limit."""
        for sender in self._senders:
            sender.stop()
        deadline = time.monotonic() + limit_s
        have_ended = [sender.join(max(0.0, deadline - time.monotonic())) for sender in self._senders]
        return all(have_ended)

    def _is_burst(self) -> bool:
        return time.monotonic() < self._burst_ends_at
