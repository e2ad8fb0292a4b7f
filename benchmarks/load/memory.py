"""Memory of a server's processes over time, and whether it is flat."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.load.processes import rss_bytes, shm_bytes

SHARED = "/dev/shm"
FLAT_SHARE = 0.05  # growth that is still called flat, of the first third's mean
MIN_JUDGED_S = 40.0  # a shorter time is not judged: pools and arenas still fill


@dataclass(frozen=True, slots=True)
class Growth:
    """First against last third of the samples, and the line through all."""

    first_mb: float
    last_mb: float
    slope_mb_per_min: float
    is_flat: bool

    def describe(self) -> str:
        return (
            f"{self.first_mb:.1f} -> {self.last_mb:.1f} MB"
            f" ({self.last_mb - self.first_mb:+.1f}, {self.slope_mb_per_min:+.2f} MB/min)"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class MemoryLog:
    def __init__(self, processes: Mapping[str, int], shm_prefix: str = "") -> None:
        self._processes, self._shm_prefix = dict(processes), shm_prefix
        self._times: list[float] = []
        self._series: dict[str, list[float]] = {role: [] for role in (*self._processes, SHARED)}

    def sample(self) -> None:
        self._times.append(time.monotonic())
        for role, pid in self._processes.items():
            self._series[role].append(rss_bytes(pid) / 1e6)
        self._series[SHARED].append(shm_bytes(self._shm_prefix) / 1e6)

    def latest_mb(self) -> float:
        return sum(values[-1] for values in self._series.values() if values)

    def growth(self, allowed_mb: float) -> dict[str, Growth]:
        """Return role -> growth; nothing with fewer than six samples, and all flat below MIN_JUDGED_S."""
        if len(self._times) < 6:
            return {}
        return {role: measure_growth(self._times, values, allowed_mb) for role, values in self._series.items()}


def measure_growth(times_s: Sequence[float], values_mb: Sequence[float], allowed_mb: float) -> Growth:
    third = len(values_mb) // 3
    first, last = statistics.fmean(values_mb[:third]), statistics.fmean(values_mb[-third:])
    slope = statistics.linear_regression(times_s, values_mb).slope * 60
    is_short = times_s[-1] - times_s[0] < MIN_JUDGED_S
    is_flat = is_short or last - first <= max(allowed_mb, FLAT_SHARE * first)
    return Growth(round(first, 2), round(last, 2), round(slope, 3), is_flat)
