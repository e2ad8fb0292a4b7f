"""What sizes could do that know the whole day: a bound of what any planner can, for benchmarks/planner_days.py.

The oracle has seen the day served by a fixed size: what each interval's prompts computed, and how many requests were
under way at its busiest moment. Each stage gets the fewest workers that the capacity model asks for, `margin` times.
They are asked for before they are needed by their start, and stay for as long as no stage may turn again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bireme.planner.capacity import Load, PlannedEngine, prefill_fits
from bireme.planner.observation import ScalingDecision
from bireme.planner.planner_settings import PlannerSettings, StageBounds
from bireme.sizing.simulator.outcome import Outcome
from bireme.sizing.simulator.scaling import IntervalFigures

Needs = tuple[list[int], list[int]]  # of prefill and decode, by interval
_RATE_S = 600.0  # over which prompts are counted: shorter, and single prompts are a load


@dataclass(slots=True)
class Witness:
    """Keeps a fixed size, and what it saw."""

    sizes: tuple[int, int]
    seen: list[IntervalFigures] = field(default_factory=list)

    def on_interval(self, figures: IntervalFigures) -> tuple[int, int]:
        self.seen.append(figures)
        return self.sizes


@dataclass(slots=True)
class Schedule:
    """Has each interval's sizes; a scaler whose decisions are kept, as those of `SimulatedScaler`."""

    needs: Needs
    settings: PlannerSettings

    def __post_init__(self) -> None:
        lead = math.ceil((self.settings.start_s + self.settings.interval_s) / self.settings.interval_s)
        trail = math.ceil(self.settings.reversal_s / self.settings.interval_s)
        self.needs = steady(self.needs[0], lead, trail), steady(self.needs[1], lead, trail)

    def at(self, now: float) -> tuple[int, int]:
        number = min(int(now / self.settings.interval_s), len(self.needs[0]) - 1)
        return self.needs[0][number], self.needs[1][number]

    def decide(self, now: float) -> ScalingDecision:
        return ScalingDecision(*self.at(now), "known beforehand")


def steady(needs: Sequence[int], lead: int, trail: int) -> list[int]:
    """Return the fewest that are there `lead` intervals before they are needed, and turn once in `trail` at most."""
    longer = _over(max, needs, trail, lead)  # no top is shorter than `trail`
    return _over(min, _over(max, longer, trail, 0), 0, trail)  # no dip either


def _over(choose: Callable[[Sequence[int]], int], values: Sequence[int], before: int, after: int) -> list[int]:
    return [choose(values[max(at - before, 0) : at + after + 1]) for at in range(len(values))]


def needs_of(
    witness: Witness, outcome: Outcome, engine: PlannedEngine, settings: PlannerSettings, margins: tuple[float, float]
) -> Needs:
    """Return what each interval needs. A margin of 0 keeps the stage as it was seen."""
    busiest = _busiest(outcome, len(witness.seen), settings.interval_s)
    context = sum(one.num_prompt + one.num_output / 2 for one in outcome.requests) / len(outcome.requests)
    most_rows = rows_within(engine, context, settings.itl_ms)
    decode = [_within(settings.decode, math.ceil(rows * margins[1] / most_rows)) for rows in busiest]
    prefill = [
        _within(settings.prefill, _prompts_need(load, engine, settings))
        for load in _loads(witness, settings, margins[0])
    ]
    fixed = witness.sizes
    return (
        prefill if margins[0] else [fixed[0]] * len(prefill),
        decode if margins[1] else [fixed[1]] * len(decode),
    )


def rows_within(engine: PlannedEngine, context: float, itl_ms: float) -> int:
    most = engine.most_rows(context)
    return max((rows for rows in range(1, most + 1) if engine.decode_ms(rows, context) <= itl_ms), default=1)


def _prompts_need(load: Load | None, engine: PlannedEngine, settings: PlannerSettings) -> int:
    if load is None:
        return 0
    counts = range(1, settings.prefill.maximum + 1)
    return next((count for count in counts if prefill_fits(engine, load, count, settings.ttft_ms, 1.0)), counts[-1])


def _loads(witness: Witness, settings: PlannerSettings, margin: float) -> Iterator[Load | None]:
    """Yield what prompts an interval and those around it have."""
    around = max(round(_RATE_S / settings.interval_s / 2), 1)
    for at in range(len(witness.seen)):
        seen = witness.seen[max(at - around, 0) : at + around + 1]
        num_prompts = sum(one.num_prompts for one in seen)
        computed = sum(one.prompt_tokens - one.cached_tokens for one in seen)
        seconds = sum(one.interval_s for one in seen)
        yield Load(num_prompts * margin / seconds, computed / num_prompts, 1.0) if num_prompts else None


def _busiest(outcome: Outcome, num_intervals: int, interval_s: float) -> list[int]:
    """Return the most requests that decode had at once, in each interval."""
    changes = list[tuple[float, int]]()
    for one, ttft_s, itl_s in zip(outcome.requests, outcome.ttft_s, outcome.itl_s, strict=True):
        begin = one.arrival_s + ttft_s
        changes += [(begin, 1), (begin + itl_s * (one.num_output - 1), -1)]
    found, rows = [0] * num_intervals, 0
    changes.sort()
    for (at, change), (until, _) in itertools.pairwise([*changes, (num_intervals * interval_s, 0)]):
        rows += change
        for number in range(int(at / interval_s), min(int(until / interval_s) + 1, num_intervals)):
            found[number] = max(found[number], rows)
    return found


def _within(bounds: StageBounds, count: int) -> int:
    return min(max(count, bounds.minimum, 1), bounds.maximum)
