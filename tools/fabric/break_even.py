"""From which prompt length on disaggregation pays: where moving a prompt's KV takes less time than computing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LONGEST = 1 << 20  # tokens; beyond what was measured a curve goes on as its last part does


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds over tokens: straight between its points, and beyond them."""

    tokens: tuple[int, ...]
    ms: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, float]) -> Curve:
        return cls(tuple(sorted(points)), tuple(points[count] for count in sorted(points)))

    @classmethod
    def line(cls, ms_per_token: float) -> Curve:
        return cls((0, 1000), (0.0, 1000 * ms_per_token))

    def at(self, tokens: float) -> float:
        begin, end = self.tokens[0], self.tokens[-1]
        if len(self.tokens) > 1 and not begin <= tokens <= end:
            near = slice(0, 2) if tokens < begin else slice(-2, None)
            (x0, x1), (y0, y1) = self.tokens[near], self.ms[near]
            return max(0.0, y0 + (tokens - x0) * (y1 - y0) / (x1 - x0))
        return float(np.interp(tokens, self.tokens, self.ms))

    def fit(self) -> tuple[float, float]:
        """Return milliseconds of any size, and a token: what the router reckons with."""
        if len(self.tokens) == 1:
            return 0.0, self.ms[0] / self.tokens[0]
        weights = 1 / np.maximum(self.ms, 1e-6)  # a short prompt's error counts as much as a long one's
        slope, start = np.polyfit(self.tokens, self.ms, 1, w=weights)
        return max(0.0, float(start)), max(0.0, float(slope))


def break_even(transfer: Curve, prefill: Curve, longest: int = LONGEST) -> int | None:
    """Return the length from which on every prompt's transfer takes less time than its prefill; None: no such."""
    lengths = _lengths(transfer, prefill, longest)
    pays = [transfer.at(count) < prefill.at(count) for count in lengths]
    if not pays[-1]:
        return None
    first = len(pays) - next((index for index, paid in enumerate(reversed(pays)) if not paid), len(pays))
    if first == 0:
        return lengths[0]
    low, high = lengths[first - 1], lengths[first]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if transfer.at(middle) < prefill.at(middle) else (middle, high)
    return high


def _lengths(transfer: Curve, prefill: Curve, longest: int) -> Sequence[int]:
    corners = {*transfer.tokens, *prefill.tokens, 1, longest}
    return sorted(count for count in corners if 1 <= count <= longest)
