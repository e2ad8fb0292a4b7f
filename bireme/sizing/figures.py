"""What a load saw of a deployment, in one form for every tool that makes loads.

As aiperf has it: tokens/s is of all answers over the time from the first request to the last token. Tokens/s a user is
one over the mean gap between a request's tokens. Its mean over the requests is what published sweeps show; one answer
that came in a burst multiplies it, so the median stands beside it. An answer that came as a whole at one time has no
gap, since that would be the time that its reader took (`BURST_GAP_S`). Where most answers came so, gaps are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

BURST_GAP_S = 1e-4  # a mean gap below is what a client takes to read a token


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the requests that were answered; None: no request had it."""

    requests: int
    failed: int  # refused, broken off, or answered with an error
    seconds: float
    input_tokens: float  # of a request, in the mean
    output_tokens: float
    tokens_per_s: float
    tokens_per_s_per_user: float | None  # mean
    tokens_per_s_per_user_p50: float | None
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None  # of requests' mean gaps
    itl_p90_ms: float | None
    itl_p99_ms: float | None
    latency_p50_ms: float | None


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered; seconds of one clock."""

    sent_at: float
    first_at: float  # its first token
    last_at: float
    num_input: int
    num_output: int

    @property
    def gap_s(self) -> float | None:
        """The mean between two tokens; None: it has one, or all came at one time."""
        gap_s = (self.last_at - self.first_at) / (self.num_output - 1) if self.num_output > 1 else 0.0
        return gap_s if gap_s >= BURST_GAP_S else None


def of_requests(answered: Sequence[Answered], failed: int) -> Figures:
    """`answered`: at least one."""
    gaps = [gap_s for one in answered if (gap_s := one.gap_s) is not None]
    if 2 * len(gaps) < sum(one.num_output > 1 for one in answered):
        gaps = []
    speeds = [1 / gap for gap in gaps]
    seconds = max(one.last_at for one in answered) - min(one.sent_at for one in answered)
    ttft = percentiles_ms([one.first_at - one.sent_at for one in answered])
    itl = percentiles_ms(gaps)
    return Figures(
        requests=len(answered),
        failed=failed,
        seconds=seconds,
        input_tokens=float(np.mean([one.num_input for one in answered])),
        output_tokens=float(np.mean([one.num_output for one in answered])),
        tokens_per_s=sum(one.num_output for one in answered) / seconds,
        tokens_per_s_per_user=float(np.mean(speeds)) if speeds else None,
        tokens_per_s_per_user_p50=float(np.median(speeds)) if speeds else None,
        ttft_p50_ms=ttft[0],
        ttft_p90_ms=ttft[1],
        ttft_p99_ms=ttft[2],
        itl_p50_ms=itl[0],
        itl_p90_ms=itl[1],
        itl_p99_ms=itl[2],
        latency_p50_ms=percentiles_ms([one.last_at - one.sent_at for one in answered])[0],
    )


def percentiles_ms(seconds: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the 50th, 90th and 99th percentile."""
    if not seconds:
        return None, None, None
    p50, p90, p99 = (1e3 * float(value) for value in np.percentile(seconds, (50, 90, 99)))
    return p50, p90, p99
