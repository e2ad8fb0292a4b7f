"""Requests of the last intervals: how many came a second, and how much in bursts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from itertools import groupby, islice, pairwise

_SPREAD = 2.0  # deviations: what is further above the mean is another load, rather than a burst
_ENDED = 0.001  # so improbable is a pause after which a load has ended


class LoadHistory:
    def __init__(self, interval_s: float, recent_s: float, mean_s: float, window_s: float) -> None:
        """`recent_s`: for which a rise has to last; `mean_s`: of the mean; `window_s`: that tells of bursts."""
        self._interval_s = interval_s
        self._num_recent = max(math.ceil(recent_s / interval_s), 1)
        self._num_mean = max(math.ceil(mean_s / interval_s), self._num_recent)
        self._rates = deque[float](maxlen=max(math.ceil(window_s / interval_s), self._num_mean))
        self._under_way = deque[float](maxlen=self._rates.maxlen)
        self.longest_pause_s = 0.0  # of a load that goes on: as it was seen, and when bursts come at random

    def observe(self, per_s: float, under_way: float = 0.0) -> None:
        self._rates.append(per_s)
        self._under_way.append(under_way)
        if per_s:
            mean = sum(self._rates) / len(self._rates)
            pauses = [len(list(group)) for is_pause, group in groupby(self._rates, lambda rate: not rate) if is_pause]
            longest_s = max(pauses, default=0) * self._interval_s
            self.longest_pause_s = max(longest_s, -math.log(_ENDED) * self.dispersion / mean)

    @property
    def per_s(self) -> float:
        """Return the mean, or that of the last intervals where bursts like those before do not explain it."""
        mean, recent = self._mean(self._num_mean), self._mean(self._num_recent)
        before = list(self._rates)[: -self._num_recent]
        deviation = math.sqrt(self._of_arrivals(before) * mean / (self._num_recent * self._interval_s))
        return recent if recent > mean + _SPREAD * deviation else mean

    @property
    def dispersion(self) -> float:
        """Return the variance of an interval's requests over their mean, which is 1 of those that come at random."""
        return self._of_arrivals(self._rates)

    @property
    def busy_dispersion(self) -> float:
        """Return the same of the requests that were under way."""
        return _dispersion_of(self._under_way)

    def _of_arrivals(self, rates: Iterable[float]) -> float:
        return _dispersion_of([rate * self._interval_s for rate in rates])

    def _mean(self, count: int) -> float:
        last = list(islice(reversed(self._rates), count))
        return sum(last) / len(last) if last else 0.0


def _dispersion_of(counts: Collection[float]) -> float:
    """Neighbors are compared, so a load that grows is no burst; nor is one that rises and falls once."""
    jumps = sorted((after - before) ** 2 for before, after in pairwise(counts))[:-2]
    if not any(jumps):
        return 1.0
    return max(sum(jumps) / (2 * len(jumps)) / (sum(counts) / len(counts)), 1.0)
