"""Workers beyond what the table asks for: where requests miss their target although it holds by the table.

Bursts within an interval, and lengths of all kinds, are in no mean. So misses are counted, over hours, against half of
the share that the table itself allows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from bireme.planner.capacity import LATE_SHARE

FEW_REQUESTS = 3  # fewer may have missed a target for reasons of their own
_MOST_WORKERS = 4.0
_HALF_LIFE_S = 24 * 3600.0  # of intervals with requests: bursts of one day come again the next


@dataclass(slots=True)
class MissedRoom:
    window_s: float
    workers: float = 0.0  # more than the table asks for
    _seen: deque[tuple[float, int, float]] = field(default_factory=deque)  # when, requests and missed ones

    def saw(self, now: float, interval_s: float, num_requests: int, num_missed: float) -> None:
        """Take an interval in. What a worker more could not have held is not `num_missed`."""
        self.workers *= 0.5 ** (interval_s / _HALF_LIFE_S)
        self._seen.append((now, num_requests, num_missed))
        while self._seen[0][0] < now - self.window_s:
            self._seen.popleft()
        missed = sum(count for _, _, count in self._seen)
        if missed >= FEW_REQUESTS and missed > LATE_SHARE / 2 * sum(count for _, count, _ in self._seen):
            self.workers = min(self.workers + 1, _MOST_WORKERS)
            self._seen.clear()  # they have been answered
