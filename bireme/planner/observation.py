"""What a planner sees, and what it answers."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

MOST_CLOCKS_APART_S = 5.0


@dataclass(frozen=True, slots=True)
class StageObservation:
    num_ready: int
    num_starting: int = 0
    num_waiting: int = 0  # requests in queues
    waiting_tokens: int = 0  # prompt tokens that are still to be computed
    kv_usage: float = 0.0  # of those that are ready, the mean
    num_running: int = 0  # requests under way

    @property
    def num_workers(self) -> int:
        return self.num_ready + self.num_starting


@dataclass(frozen=True, slots=True)
class Observation:
    """One interval. None: nobody told it, or nothing came of which it could be the mean."""

    at_s: float  # its end
    interval_s: float
    num_requests: int | None  # that came
    prompt_tokens: float | None  # of a request, the mean, less what caches had
    output_tokens: float | None
    ttft_ms: float | None
    itl_ms: float | None
    prefill: StageObservation | None
    decode: StageObservation | None
    doubt: str = ""  # why who observed does not believe it
    late_share: float | None = None  # of first tokens, that came after the target
    slow_share: float | None = None  # of requests, whose mean gap was above the target
    cached_tokens: float | None = None  # of a request's prompt that caches had, the mean

    def problem(self, now: float, max_age_s: float) -> str:
        """Return why nothing can be decided by it; "": it can."""
        return self.doubt or self._missing() or self._out_of_time(now, max_age_s) or self._absurd()

    def _missing(self) -> str:
        told = {"num_requests": self.num_requests, "prefill": self.prefill, "decode": self.decode}
        missing = [name for name, value in told.items() if value is None]
        return f"missing: {', '.join(missing)}" if missing else ""

    def _out_of_time(self, now: float, max_age_s: float) -> str:
        if not math.isfinite(self.at_s):
            return f"absurd: at_s {self.at_s}"
        if (age_s := now - self.at_s) > max_age_s:
            return f"stale: figures are {age_s:.0f} s old, {max_age_s:.0f} are allowed"
        if age_s < -MOST_CLOCKS_APART_S:
            return f"clocks apart: figures are from {-age_s:.0f} s ahead"
        return ""

    def _absurd(self) -> str:
        most = {"late_share": 1.0, "slow_share": 1.0}
        for name in ("num_requests", "prompt_tokens", "output_tokens", "cached_tokens", "ttft_ms", "itl_ms", *most):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most.get(name, sys.float_info.max):
                return f"absurd: {name} {value}"
        if not 0 < self.interval_s < math.inf:
            return f"absurd: interval_s {self.interval_s}"
        for name in ("prefill", "decode"):
            stage = getattr(self, name)
            counts = (stage.num_ready, stage.num_starting, stage.num_waiting, stage.num_running, stage.waiting_tokens)
            if min(counts) < 0 or not 0 <= stage.kv_usage <= 1:
                return f"absurd: {name} {stage}"
        return ""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    prefill: int
    decode: int
    reason: str

    @property
    def is_held(self) -> bool:
        """Whether nothing was decided: what was observed can't be believed."""
        return self.reason.startswith("hold: ")
