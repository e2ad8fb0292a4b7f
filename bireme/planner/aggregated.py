"""The planner of an aggregated deployment: workers of one stage, `decode`, which compute prompts as well.

A worker's prompts take a share of its time, and the gaps between tokens grow by it. A prompt waits for others, and its
steps have the rows that decode as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from bireme.planner import capacity, planner
from bireme.planner.capacity import Load, PlannedEngine
from bireme.planner.observation import Observation, ScalingDecision
from bireme.planner.planner import WorkerPlanner
from bireme.planner.planner_settings import PlannerSettings, StageBounds
from bireme.planner.predictors import Predictor

_FULL = 0.95  # above this share of its time a worker has a queue that grows
_ROUNDS = 64


def gap_ms(engine: PlannedEngine, load: Load, count: int, rows: float) -> float:
    """Return the mean time between two tokens with so many rows; infinite where prompts take all of the time."""
    share = capacity.prefill_use(engine, load, count)
    return engine.decode_ms(rows, capacity.context_of(load)) / (1 - share) if share < 1 else math.inf


def rows_of(engine: PlannedEngine, load: Load, count: int) -> float:
    """Return the requests that decode on each worker; infinite where it can't keep up."""
    per_s, most, rows = load.requests_per_s / max(count, 1), capacity.most_rows(engine, load), 0.0
    for _ in range(_ROUNDS):  # rows make gaps longer, and those make rows more
        found = per_s * load.output_tokens * gap_ms(engine, load, count, rows) / 1e3
        if found > most:
            return math.inf
        if abs(found - rows) < 0.01:
            break
        rows = found
    return rows


def carries(engine: PlannedEngine, load: Load, count: int, share: float = _FULL) -> bool:
    """Whether requests are served as fast as they come, whatever they wait."""
    most = capacity.most_rows(engine, load)
    return capacity.prefill_use(engine, load, count) <= share and rows_of(engine, load, count) <= share * most


def ttft_factor(engine: PlannedEngine, load: Load, rows: float) -> float:
    """Return how much longer a prompt takes for the rows in its steps."""
    return 1 + engine.decode_ms(rows, capacity.context_of(load)) / engine.prompt_ms(load.prompt_tokens) if rows else 1.0


class AggregatedPlanner(WorkerPlanner):
    """Decides `decode` alone: its bounds are those of all workers, and `prefill` is always 0."""

    def __init__(self, settings: PlannerSettings, engine: PlannedEngine, predictor: Predictor | None = None) -> None:
        """Raises ConfigError for settings that contradict each other."""
        super().__init__(_without_prefill(settings), engine, engine, predictor)

    def set_bounds(self, settings: PlannerSettings) -> None:
        super().set_bounds(_without_prefill(settings))

    def _without_lengths(self, observation: Observation, now: float) -> ScalingDecision:
        assert observation.decode is not None
        if observation.decode.num_workers > 0:
            return self._hold(observation, now, "missing: prompt_tokens, output_tokens of any interval")
        return self._conclude(observation, now, (0, 1), ["requests wait for a first worker"])

    def _expected_loads(self, observation: Observation) -> dict[str, Load]:
        """Prompts wait at the workers that compute them."""
        return super()._expected_loads(replace(observation, prefill=observation.decode))

    def _learn_corrections(self, observation: Observation) -> None:
        """Prompts wait at the workers that compute them."""
        super()._learn_corrections(replace(observation, prefill=observation.decode))

    def _expected_ms(self, load: Load, num_ready: Mapping[str, int]) -> tuple[float, float]:
        engine, count = self._engines["decode"], num_ready["decode"]
        if not carries(engine, load, count, planner._STEADY_USE):
            return math.inf, math.inf
        rows = rows_of(engine, load, count)
        ttft_ms = capacity.expected_ttft_ms(engine, load, count) * ttft_factor(engine, load, rows)
        return ttft_ms, gap_ms(engine, load, count, rows)

    def _needs_by_table(self, loads: dict[str, Load]) -> tuple[tuple[int, int], str]:
        settings, engine, found = self._settings, self._engines["decode"], self.corrections
        load, notes = loads["decode"], list[str]()
        if (share := planner._EASY_SHARE.get(settings.target)) is not None:
            count = planner._fewest(settings.decode, lambda number: carries(engine, load, number, share))
        else:
            count = self._for_sla(load, notes) + round(self.room.workers)
        why = (
            f"{load.requests_per_s:.2f} requests/s of {load.prompt_tokens:.0f}/{load.output_tokens:.0f} tokens need"
            f" {count} aggregated ({settings.target}; corrections {found.ttft:.2f}, {found.itl:.2f};"
            f" bursts {load.dispersion:.1f}, {load.busy_dispersion:.1f}, room {self.room.workers:.1f})"
        )
        return (0, count), "; ".join([why, *notes])

    def _for_sla(self, load: Load, notes: list[str]) -> int:
        """A target that one request alone misses is out of reach of any number: then the load counts."""
        settings, engine, found = self._settings, self._engines["decode"], self.corrections
        alone = {
            "ttft_ms": engine.prompt_ms(load.prompt_tokens) * found.ttft,
            "itl_ms": engine.decode_ms(1, capacity.context_of(load)) * found.itl,
        }
        missed = [name for name, ms in alone.items() if ms > getattr(settings, name)]
        notes += [
            f"{name} {getattr(settings, name):g} is out of reach: alone it is {alone[name]:.1f}" for name in missed
        ]

        def fits(count: int) -> bool:
            rows = rows_of(engine, load, count)
            if not carries(engine, load, count):
                return False
            busy = capacity.busy_rows(rows, load, count)
            correction = found.ttft * ttft_factor(engine, load, rows)
            return (
                busy <= capacity.most_rows(engine, load)
                and ("itl_ms" in missed or gap_ms(engine, load, count, busy) * found.itl <= settings.itl_ms)
                and ("ttft_ms" in missed or capacity.prefill_fits(engine, load, count, settings.ttft_ms, correction))
            )

        return planner._fewest(settings.decode, fits)

    def _needs_by_queues(self, observation: Observation) -> tuple[tuple[int, int], str]:
        """One more or one less; nothing while workers start, whose queues are still the others'."""
        decode = observation.decode
        assert decode is not None
        waiting = decode.num_waiting / max(decode.num_ready, 1)
        fewer_kv = decode.kv_usage * decode.num_ready / max(decode.num_ready - 1, 1)
        is_full = waiting > planner._WAITING_PROMPTS or decode.kv_usage > planner._HIGH_KV
        is_easy = waiting < planner._WAITING_PROMPTS / 4 and fewer_kv < planner._LOW_KV
        need = max(decode.num_workers + (0 if decode.num_starting else is_full - is_easy), 1)
        return (0, need), f"{waiting:.1f} requests wait a worker, it uses {decode.kv_usage:.0%} of its KV (load)"


def _without_prefill(settings: PlannerSettings) -> PlannerSettings:
    return msgspec.structs.replace(settings, prefill=StageBounds(minimum=0, gpus=1))
