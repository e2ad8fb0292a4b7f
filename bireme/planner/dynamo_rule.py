"""Dynamo's throughput planner, as it is published: the baseline that ours is compared with.

    prefill = ceil(next requests x next prompt / interval x min(1, TTFT / expected) / tokens/s of a GPU / GPUs)
    decode  = ceil(next requests x answer / interval / best tokens/s of a GPU within ITL / (ITL / expected) / GPUs)

Predictions are constant, the next interval as the last. A budget scales both. No request, no change of sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bireme.planner.capacity import PlannedEngine
from bireme.planner.observation import Observation, ScalingDecision
from bireme.planner.planner_settings import PlannerSettings


@dataclass(frozen=True, slots=True)
class DynamoProfile:
    """What its profiler measures, here from a table of step times."""

    prefill: PlannedEngine
    decode: PlannedEngine

    def ttft_ms(self, prompt_tokens: float) -> float:
        return self.prefill.prompt_ms(prompt_tokens)

    def prefill_tokens_per_s(self, prompt_tokens: float) -> float:
        """Of a worker, with one prompt at a time."""
        return prompt_tokens / self.ttft_ms(prompt_tokens) * 1e3

    def itl_ms(self, requests_under_way: float, context: float) -> float:
        return self.decode.decode_ms(requests_under_way, context)

    def decode_tokens_per_s(self, itl_ms: float, context: float) -> float:
        """Return the most of a worker whose gaps stay within; one row's where none does."""
        within = [
            rows / itl * 1e3
            for rows in range(1, self.decode.most_rows(context) + 1)
            if (itl := self.decode.decode_ms(rows, context)) <= itl_ms
        ]
        return max(within, default=1e3 / self.decode.decode_ms(1, context))


class DynamoRule:
    def __init__(self, settings: PlannerSettings, profile: DynamoProfile) -> None:
        settings.check()
        self._settings, self._profile = settings, profile

    def decide(self, observation: Observation) -> ScalingDecision:
        sizes = observation.prefill, observation.decode
        if sizes[0] is None or sizes[1] is None:
            raise ValueError("sizes of both stages are needed")
        if not observation.num_requests or not observation.prompt_tokens or not observation.output_tokens:
            return ScalingDecision(sizes[0].num_workers, sizes[1].num_workers, "no requests: as it was")
        by_ttft, by_itl = self._corrections(observation, sizes[1].num_ready)
        requests_per_s = observation.num_requests / observation.interval_s
        prefill = num_prefill(
            requests_per_s, observation.prompt_tokens, by_ttft,
            self._profile.prefill_tokens_per_s(observation.prompt_tokens),
        )  # fmt: skip
        context = observation.prompt_tokens + observation.output_tokens / 2
        best = self._profile.decode_tokens_per_s(self._settings.itl_ms / by_itl, context)
        decode = num_decode(requests_per_s, observation.output_tokens, best)
        found = self._capped(max(prefill, self._settings.prefill.minimum), max(decode, self._settings.decode.minimum))
        return ScalingDecision(*found, f"{prefill}+{decode} by corrections {by_ttft:.2f}, {by_itl:.2f}")

    def _corrections(self, observation: Observation, num_ready: int) -> tuple[float, float]:
        assert observation.num_requests and observation.prompt_tokens and observation.output_tokens
        by_ttft = (observation.ttft_ms or 0) / self._profile.ttft_ms(observation.prompt_tokens)
        if not observation.itl_ms:
            return by_ttft or 1.0, 1.0
        duration_s = observation.itl_ms * observation.output_tokens / 1e3
        under_way = observation.num_requests / observation.interval_s * duration_s / max(num_ready, 1)
        context = observation.prompt_tokens + observation.output_tokens / 2
        return by_ttft or 1.0, observation.itl_ms / self._profile.itl_ms(under_way, context)

    def _capped(self, prefill: int, decode: int) -> tuple[int, int]:
        settings = self._settings
        if (gpus := settings.gpus_of(prefill, decode)) <= settings.max_gpus:
            return prefill, decode
        prefill = max(settings.prefill.minimum, round(prefill * settings.max_gpus / gpus))
        left = settings.max_gpus - prefill * settings.prefill.gpus
        return prefill, max(settings.decode.minimum, round(left / settings.decode.gpus))


def num_prefill(requests_per_s: float, prompt_tokens: float, correction: float, tokens_per_s: float) -> int:
    """`tokens_per_s` of a worker, that is of a GPU times its GPUs."""
    return math.ceil(requests_per_s * prompt_tokens * min(1.0, correction) / tokens_per_s)


def num_decode(requests_per_s: float, output_tokens: float, tokens_per_s: float) -> int:
    return math.ceil(requests_per_s * output_tokens / tokens_per_s)
