"""Planners in the simulator: its figures as observations, their decisions as its sizes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bireme.planner.observation import Observation, ScalingDecision, StageObservation
from bireme.sizing.simulator.scaling import IntervalFigures, StageLoad


@dataclass(slots=True)
class SimulatedScaler:
    """Asks one planner, and keeps what it said."""

    decide: Callable[[Observation, float], ScalingDecision]
    decisions: list[tuple[float, ScalingDecision]] = field(default_factory=list)

    def reversals(self, window_s: float) -> tuple[int, int]:
        """Return how often sizes changed their direction, and the most that one stage did within a window."""
        times = [at for at, _ in self.decisions]
        stages = [[one.prefill for _, one in self.decisions], [one.decode for _, one in self.decisions]]
        found = [reversals(sizes, times, window_s) for sizes in stages]
        return sum(count for count, _ in found), max(most for _, most in found)

    def on_interval(self, figures: IntervalFigures) -> tuple[int, int]:
        decision = self.decide(observation_of(figures), figures.at_s)
        self.decisions.append((figures.at_s, decision))
        return decision.prefill, decision.decode


def observation_of(figures: IntervalFigures) -> Observation:
    computed, num_prompts = max(figures.prompt_tokens - figures.cached_tokens, 0), figures.num_prompts
    return Observation(
        at_s=figures.at_s,
        interval_s=figures.interval_s,
        num_requests=figures.num_arrived,
        prompt_tokens=computed / num_prompts if num_prompts else None,
        cached_tokens=figures.cached_tokens / num_prompts if num_prompts else None,
        output_tokens=figures.output_tokens / figures.num_ended if figures.num_ended else None,
        ttft_ms=_mean_ms(figures.ttft_s),
        itl_ms=_mean_ms(figures.itl_s),
        prefill=_stage_of(figures.prefill),
        decode=_stage_of(figures.decode),
        late_share=figures.num_late / len(figures.ttft_s) if figures.ttft_s else None,
        slow_share=figures.num_slow / figures.num_ended if figures.num_ended else None,
    )


def reversals(sizes: Sequence[int], times: Sequence[float], window_s: float) -> tuple[int, int]:
    """Return how often a size changed its direction, and the most of these within a window."""
    at, way = list[float](), 0
    for time, (before, after) in zip(times[1:], itertools.pairwise(sizes), strict=True):
        if (after - before) * way < 0:
            at.append(time)
        way = after - before or way
    most = max((sum(begin <= time < begin + window_s for time in at) for begin in at), default=0)
    return len(at), most


def _stage_of(load: StageLoad) -> StageObservation:
    usage = statistics.fmean(load.kv_usage) if load.kv_usage else 0.0
    return StageObservation(
        load.num_ready, load.num_starting, load.num_waiting, load.waiting_tokens, min(usage, 1.0), load.num_running
    )


def _mean_ms(seconds: Sequence[float]) -> float | None:
    return statistics.fmean(seconds) * 1e3 if seconds else None
