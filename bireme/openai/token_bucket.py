"""A budget that refills steadily: a rate a minute, a minute's worth at most."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """May be overdrawn by an amount not known before; then it refuses until it has refilled."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._level = per_minute
        self._at = clock()

    def wait_s(self, amount: float) -> float:
        """Return how long until `amount` may be taken; 0: now. More than a minute's worth needs a full bucket."""
        self._refill()
        missing = min(amount, self._per_minute) - self._level
        return max(0.0, missing * 60 / self._per_minute)

    def take(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._per_minute, self._level + (now - self._at) * self._per_minute / 60)
        self._at = now
