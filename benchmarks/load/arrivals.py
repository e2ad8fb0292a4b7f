"""What requests that arrive at random saw. It needs numpy alone: other servers are measured in their environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GOOD_TTFT_S, GOOD_TPOT_S = 0.25, 0.025  # what a request may take to count for goodput
_FIRST_S = 1.0  # of a load that is not measured


@dataclass(slots=True)
class Seen:
    """Moments of one request, by one clock."""

    began_at: float
    times: list[float] = field(default_factory=list)  # of each token, or of each event with tokens
    num_tokens: int = 0  # 0: as many as there are times

    @property
    def ttft(self) -> float:
        return self.times[0] - self.began_at

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.times[-1] - self.times[0]) / max((self.num_tokens or len(self.times)) - 1, 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def summary(rate: float, asked: Sequence[Seen], began: float, load_ended: float) -> dict[str, Any]:
    """Return ms, tokens/s and goodput; requests of the first and last second are load, not measured."""
    kept = [one for one in asked if one.began_at - began > _FIRST_S]
    measured_s = load_ended - began - _FIRST_S
    tokens = sum(
        (one.num_tokens or len(one.times))
        / len(one.times)
        * sum(began + _FIRST_S < at < load_ended for at in one.times)
        for one in asked
    )
    good = sum(one.ttft <= GOOD_TTFT_S and one.tpot <= GOOD_TPOT_S for one in kept)
    found: dict[str, Any] = {
        "rate": rate,
        "requests": len(kept),
        "tokens_per_s": round(tokens / measured_s),
        "goodput": round(good / measured_s, 2),
    }
    tpots = [one.tpot for one in kept if len(one.times) > 8]
    gaps = [gap for one in kept for gap in one.gaps]
    for name, values in {"ttft": [one.ttft for one in kept], "tpot": tpots, "gap": gaps}.items():
        for quantile in (50, 90, 99):
            found[f"{name}_p{quantile}_ms"] = round(1e3 * float(np.percentile(values, quantile)), 2)
    return found | {"gap_max_ms": round(1e3 * max(gaps), 2)}
