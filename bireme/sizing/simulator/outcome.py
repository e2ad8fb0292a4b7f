"""What became of simulated requests, as figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bireme.sizing.simulator.trace import SimulatedRequest


@dataclass(slots=True)
class StageUse:
    """Of one stage, by worker."""

    work_s: list[float] = field(default_factory=list)  # what its tokens add to its steps
    busy_s: list[float] = field(default_factory=list)
    up_s: list[float] = field(default_factory=list)  # from its start to its end
    num_requests: list[int] = field(default_factory=list)

    @property
    def busy_share(self) -> float:
        return sum(self.busy_s) / max(sum(self.up_s), 1e-12)

    def while_up(self, values: Sequence[float]) -> list[float]:
        """Return each worker's per second."""
        return [value / max(up_s, 1e-12) for value, up_s in zip(values, self.up_s, strict=True)]


@dataclass(slots=True)
class Outcome:
    """What one mode did with a trace. Seconds and tokens."""

    mode: str
    requests: list[SimulatedRequest] = field(default_factory=list)  # in the order of their ends, as the next two
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)  # a request's mean
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_predicted_tokens: int = 0
    num_endless_tokens: int = 0  # what a cache without end, shared by all, would have
    num_refused: int = 0  # all workers were busy
    num_transferred: int = 0  # prompts that prefill computed
    prefill: StageUse = field(default_factory=StageUse)
    decode: StageUse = field(default_factory=StageUse)
    duration_s: float = 0.0
    num_output_tokens: int = 0
    num_good: int = 0  # within the SLO

    def summary(self) -> dict[str, float | str]:
        duration_s, decode = max(self.duration_s, 1e-12), self.decode
        num_prompt_tokens = max(self.num_prompt_tokens, 1)
        rows: dict[str, float | str] = {
            "mode": self.mode,
            "requests": len(self.ttft_s),
            "refused": self.num_refused,
            "ttft_p50_ms": percentile_ms(self.ttft_s, 50),
            "ttft_p99_ms": percentile_ms(self.ttft_s, 99),
            "itl_p50_ms": percentile_ms(self.itl_s, 50),
            "itl_p99_ms": percentile_ms(self.itl_s, 99),
            "hit_rate": self.num_cached_tokens / num_prompt_tokens,
            "hits_of_endless": self.num_cached_tokens / max(self.num_endless_tokens, 1),
            "computed_tokens": self.num_prompt_tokens - self.num_cached_tokens,
            "predicted_over_actual": self.num_predicted_tokens / max(self.num_cached_tokens, 1),
            "load_cov": variation(decode.while_up(decode.work_s)),
            "requests_cov": variation(decode.while_up(decode.num_requests)),
            "busy_share": decode.busy_share,
            "tokens_per_s": self.num_output_tokens / duration_s,
            "goodput_per_s": self.num_good / duration_s,
            "good_share": self.num_good / max(len(self.ttft_s) + self.num_refused, 1),
            "worker_hours": (sum(self.prefill.up_s) + sum(decode.up_s)) / 3600,
        }
        if self.prefill.up_s:
            rows["prefill_busy_share"] = self.prefill.busy_share
            rows["transferred"] = self.num_transferred
        return rows


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    """Return 0 of nothing."""
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else 0.0


def variation(values: Sequence[float]) -> float:
    """Return the coefficient of variation: the standard deviation over the mean."""
    return statistics.pstdev(values) / max(statistics.fmean(values), 1e-12) if values else 0.0
