"""What a planner is told: the target, its bounds and the budget."""

from __future__ import annotations

from typing import Literal

import msgspec

from bireme.errors import ConfigError
from bireme.settings import Duration, NotNegative, Positive, PositiveDuration

PlannerTarget = Literal["throughput", "latency", "load", "sla"]


class StageBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    minimum: NotNegative = 1  # 0: without requests there may be none; with some there is one at least
    maximum: Positive = 64
    gpus: Positive = 1  # of a worker


class PlannerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: PlannerTarget = "sla"
    ttft_ms: PositiveDuration = 500.0
    itl_ms: PositiveDuration = 50.0
    max_gpus: Positive = 8
    prefill: StageBounds = StageBounds()
    decode: StageBounds = StageBounds()
    interval_s: PositiveDuration = 60.0
    start_s: Duration = 60.0  # until a worker that is asked for is ready
    ready_timeout_s: Duration = 600.0  # after which one that is not ready is told of
    reversal_s: Duration = 600.0  # at the least between two changes of direction, of each stage
    down_window_s: Duration = 7200.0  # fewer workers only where all of it would have done with them
    headroom: PositiveDuration = 1.1  # of the load that is sized for
    # Without requests, until both stages go to their minimum; None: longer than a load like the last would pause
    idle_s: PositiveDuration | None = None

    @property
    def max_age_s(self) -> float:
        return 2 * self.interval_s

    def check(self) -> None:
        """Raises ConfigError naming the field. Values by themselves are checked by `conversion.convert`."""
        for name, bounds in (("prefill", self.prefill), ("decode", self.decode)):
            if bounds.minimum > bounds.maximum:
                raise ConfigError(f"planner.{name}.minimum: {bounds.minimum} is above the maximum, {bounds.maximum}")
        least = self.gpus_of(self.prefill.minimum, self.decode.minimum)
        if self.max_gpus < least:
            raise ConfigError(
                f"planner.max_gpus: {self.max_gpus}; the minimum of {self.prefill.minimum} prefill and"
                f" {self.decode.minimum} decode workers needs {least}. Raise it, or lower planner.prefill.minimum or"
                " planner.decode.minimum"
            )

    def gpus_of(self, prefill: int, decode: int) -> int:
        return prefill * self.prefill.gpus + decode * self.decode.gpus

    def within_budget(self, prefill: int, decode: int) -> tuple[int, int]:
        """Return at most so many: within bounds and budget, the stage with the smaller share of its need first."""
        needs = {
            "prefill": min(max(prefill, self.prefill.minimum), self.prefill.maximum),
            "decode": min(max(decode, self.decode.minimum), self.decode.maximum),
        }
        if self.gpus_of(**needs) <= self.max_gpus:
            return needs["prefill"], needs["decode"]
        have = {"prefill": self.prefill.minimum, "decode": self.decode.minimum}
        while True:
            wanting = sorted((have[stage] / needs[stage], stage) for stage in have if have[stage] < needs[stage])
            for _, stage in wanting:
                more = have | {stage: have[stage] + 1}
                if self.gpus_of(**more) <= self.max_gpus:
                    have = more
                    break
            else:
                return have["prefill"], have["decode"]
