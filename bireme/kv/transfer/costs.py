"""What transfers take, learned from those that have ended: a start, and so much for each token."""

from __future__ import annotations

from collections import deque

_KEPT = 64
_FEW = 4  # do not tell a rule from an exception


class TransferCosts:
    """Filled by one thread; others may ask."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=_KEPT)  # tokens, ms

    def add(self, num_tokens: int, seconds: float) -> None:
        self._points.append((num_tokens, 1e3 * seconds))

    @property
    def line_ms(self) -> tuple[float, float] | None:
        """Return start and price of a token; None: too few have come.

        A line through the medians of the shorter and the longer half, so that single late ones do not count.
        """
        points = sorted(self._points)
        if len(points) < _FEW:
            return None
        half = len(points) // 2
        (short, quick), (long, slow) = (_medians(part) for part in (points[:half], points[half:]))
        slope = max(0.0, (slow - quick) / (long - short)) if long > short else 0.0
        start = max(0.0, quick - slope * short)
        return start, slope if start else slow / long


def _medians(points: list[tuple[int, float]]) -> tuple[float, float]:
    lengths, times = (sorted(column) for column in zip(*points, strict=True))
    return float(lengths[len(lengths) // 2]), times[len(times) // 2]
