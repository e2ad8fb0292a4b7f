"""The shares of an interval's requests that missed a target, as far as a histogram's buckets can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ROUNDING = 1e-9  # of bounds, which pages write as decimal numbers


@dataclass(frozen=True, slots=True)
class MissedShare:
    """Where no bucket ends at the target, what missed it is between two numbers."""

    least: float
    most: float


def missed_share(counts: Mapping[float, float], target_s: float) -> MissedShare | None:
    """Return the share of observations above the target. None: there are none.

    `counts`: those up to each bound in seconds, infinity included: Prometheus' `le`, of the interval alone.
    """
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    below = max((count for bound, count in counts.items() if bound <= target_s * (1 + _ROUNDING)), default=0.0)
    within = min((count for bound, count in counts.items() if bound >= target_s * (1 - _ROUNDING)), default=total)
    return MissedShare(max(1 - max(within, below) / total, 0.0), 1 - below / total)
