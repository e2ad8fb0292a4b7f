"""How many prefill and decode workers there should be: decided once an interval, by what was observed alone.

Sizes come from the engine's table of step times, corrected by what is measured. What can't be believed changes nothing:
the planner holds, and says why. Nothing is started or ended here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from bireme.errors import ConfigError
from bireme.planner import capacity
from bireme.planner.capacity import Load, PlannedEngine
from bireme.planner.direction import Direction
from bireme.planner.load_history import LoadHistory
from bireme.planner.missed_room import MissedRoom
from bireme.planner.observation import Observation, ScalingDecision, StageObservation
from bireme.planner.planner_settings import PlannerSettings, StageBounds
from bireme.planner.predictors import ConstantPredictor, Predictor

_SMOOTHING = 0.3  # weight of an interval's lengths and corrections
_MOST_CORRECTION = 3.0  # either way
# A slow engine is slow in every interval, requests wait for others in some: that is what room is for. So of the last
# corrections so many count, the lower quartile of them.
_CORRECTED_INTERVALS, _QUANTILE = 30, 0.25
_ENOUGH_INTERVALS = 5  # before that of TTFT counts: a burst or two are no slow engine
_ENOUGH_REQUESTS = 10  # for their times to say something
_STEADY_USE = 0.8  # above, times are the queue's rather than the engine's
_EASY_SHARE = {"throughput": 0.9, "latency": 0.5}  # of what a stage can do at the most
_IDLE_INTERVALS = 2  # without any request, before both stages go to their minimum
# Target "load"
_WAITING_PROMPTS = 1.0  # a prefill worker: above, one more; below a quarter of it on all, one less
_HIGH_KV, _LOW_KV = 0.8, 0.4


@dataclass(slots=True)
class Corrections:
    """What is measured over what the table says."""

    ttft: float = 1.0  # no less: the mean of few prompts is mostly that of the short ones
    itl: float = 1.0
    _ttft: deque[float] = field(default_factory=lambda: deque(maxlen=_CORRECTED_INTERVALS))
    _itl: deque[float] = field(default_factory=lambda: deque(maxlen=_CORRECTED_INTERVALS))

    def saw_ttft(self, measured_ms: float, expected_ms: float) -> None:
        self._ttft.append(_bounded(measured_ms / expected_ms))
        if len(self._ttft) >= _ENOUGH_INTERVALS:
            self.ttft = max(sorted(self._ttft)[int(_QUANTILE * len(self._ttft))], 1.0)

    def saw_itl(self, measured_ms: float, expected_ms: float) -> None:
        self._itl.append(_bounded(measured_ms / expected_ms))
        self.itl = sorted(self._itl)[int(_QUANTILE * len(self._itl))]


class WorkerPlanner:
    def __init__(
        self,
        settings: PlannerSettings,
        prefill: PlannedEngine,
        decode: PlannedEngine,
        predictor: Predictor | None = None,
    ) -> None:
        """Raises ConfigError for settings that contradict each other."""
        settings.check()
        self._settings = settings
        self._engines = {"prefill": prefill, "decode": decode}
        self._predictor = predictor or ConstantPredictor()
        self._directions = {
            stage: Direction(settings.reversal_s, settings.down_window_s) for stage in ("prefill", "decode")
        }
        self.corrections = Corrections()
        self._lengths: tuple[float, float, float] | None = None  # of prompts, answers, and what caches had
        self._num_lengths = 0  # requests that these are of
        self.room = MissedRoom(settings.down_window_s)  # of decode
        self._num_idle = 0  # intervals, up to the present one
        # A burst that is over before a worker can come is nothing to ask for workers by
        recent_s = (self._steps + 1) * settings.interval_s
        self._history = LoadHistory(settings.interval_s, recent_s, settings.reversal_s, settings.down_window_s)
        self._last_at_s = -math.inf
        self._last: tuple[int, int] | None = None  # decided
        self._num_ready = {"prefill": 0, "decode": 0}
        self._starting_since: dict[str, float] = {}

    @property
    def settings(self) -> PlannerSettings:
        return self._settings

    @property
    def _steps(self) -> int:
        """Intervals until workers that are asked for now are there, and the next decision."""
        return 1 + math.ceil(self._settings.start_s / self._settings.interval_s)

    @property
    def num_reversals(self) -> int:
        return sum(direction.num_reversals for direction in self._directions.values())

    def set_budget(self, max_gpus: int) -> None:
        """From the next decision on. Raises ConfigError for less than the minimum needs."""
        self.set_bounds(msgspec.structs.replace(self._settings, max_gpus=max_gpus))

    def set_bounds(self, settings: PlannerSettings) -> None:
        """Take all that may change while it runs, from the next decision on. Raises ConfigError."""
        settings.check()
        for name in ("target", "interval_s", "reversal_s", "down_window_s"):
            if getattr(settings, name) != (known := getattr(self._settings, name)):
                raise ConfigError(f"planner.{name}: it can't change from {known} while the planner runs")
        self._settings = settings

    def decide(self, observation: Observation, now: float) -> ScalingDecision:
        problem = observation.problem(now, self._settings.max_age_s)
        if not problem and observation.at_s <= self._last_at_s:
            problem = f"nothing new since {self._last_at_s:.0f}"
        if problem:
            return self._hold(observation, now, problem)
        self._last_at_s = observation.at_s
        assert observation.prefill is not None and observation.decode is not None
        assert observation.num_requests is not None
        self._learn_lengths(observation)
        self._history.observe(observation.num_requests / observation.interval_s, observation.decode.num_running)
        self._predictor.observe(self._history.per_s)
        notes = self._note_starts(observation, now)
        self._num_idle = self._num_idle + 1 if self._is_quiet(observation) else 0
        if self._num_idle:
            needs, why = self._needs_when_quiet(observation), "no requests"
        elif self._settings.target == "load":
            needs, why = self._needs_by_queues(observation)
        elif self._lengths is None:
            return self._without_lengths(observation, now)
        else:
            loads = self._expected_loads(observation)
            self._learn_corrections(observation)
            needs, why = self._needs_by_table(loads)
        return self._conclude(observation, now, needs, [why, *notes])

    def _without_lengths(self, observation: Observation, now: float) -> ScalingDecision:
        """Nothing can be sized; but who finds no worker at all never gets a length."""
        assert observation.prefill is not None and observation.decode is not None
        have = observation.prefill.num_workers, observation.decode.num_workers
        if min(have) > 0:
            return self._hold(observation, now, "missing: prompt_tokens, output_tokens of any interval")
        return self._conclude(
            observation, now, (max(have[0], 1), max(have[1], 1)), ["requests wait for a first worker"]
        )

    # What is learned

    def _learn_lengths(self, observation: Observation) -> None:
        """Of all requests the mean, until an interval's weight is more; one of few says little."""
        if not observation.prompt_tokens or not observation.output_tokens:
            return
        found = observation.prompt_tokens, observation.output_tokens, observation.cached_tokens or 0.0
        num_requests = observation.num_requests or 1
        known, self._num_lengths = self._lengths or found, self._num_lengths + num_requests
        weight = max(_SMOOTHING * min(num_requests / _ENOUGH_REQUESTS, 1), num_requests / self._num_lengths)
        prompt, output, cached = (_smooth(*pair, weight) for pair in zip(known, found, strict=True))
        self._lengths = prompt, output, cached

    def _learn_corrections(self, observation: Observation) -> None:
        """By intervals that say what the engine does: enough requests, workers that are warm, no queue."""
        assert observation.prefill is not None and observation.decode is not None and self._lengths is not None
        stages = {"prefill": observation.prefill, "decode": observation.decode}
        are_steady = {
            name: stage.num_starting == 0 and 0 < stage.num_ready == self._num_ready[name]
            for name, stage in stages.items()
        }
        num_ready = self._num_ready = {name: stage.num_ready for name, stage in stages.items()}
        load = Load((observation.num_requests or 0) / observation.interval_s, *self._lengths)
        self._learn_room(observation, load, are_steady["decode"])
        if not all(are_steady.values()) or (observation.num_requests or 0) < _ENOUGH_REQUESTS:
            return
        ttft_ms, itl_ms = self._expected_ms(load, num_ready)
        if observation.ttft_ms and ttft_ms < math.inf:
            self.corrections.saw_ttft(observation.ttft_ms, ttft_ms)
        if observation.itl_ms and itl_ms < math.inf:
            self.corrections.saw_itl(observation.itl_ms, itl_ms)

    def _expected_ms(self, load: Load, num_ready: Mapping[str, int]) -> tuple[float, float]:
        """Return TTFT and ITL by the table; infinite where they would be a queue's."""
        prefill, decode = self._engines["prefill"], self._engines["decode"]
        ttft_ms = capacity.expected_ttft_ms(prefill, load, num_ready["prefill"])
        is_steady = capacity.prefill_use(prefill, load, num_ready["prefill"]) < _STEADY_USE
        return ttft_ms if is_steady else math.inf, capacity.expected_itl_ms(decode, load, num_ready["decode"])

    def _learn_room(self, observation: Observation, load: Load, is_steady: bool) -> None:
        """Count what workers that are warm missed, and a worker more would have held.

        All gaps are those of a batch, so each that is slow counts. A prompt may be late by itself: it is longer than
        others, or no cache has its beginning. So late ones make no room.
        """
        num_requests, decode = observation.num_requests or 0, self._engines["decode"]
        slow = round((observation.slow_share or 0.0) * num_requests)
        alone_ms = decode.decode_ms(1, capacity.context_of(load)) * self.corrections.itl
        counted = slow if is_steady and alone_ms <= self._settings.itl_ms else 0
        self.room.saw(observation.at_s, observation.interval_s, num_requests, counted)

    def _note_starts(self, observation: Observation, now: float) -> list[str]:
        """One that never becomes ready counts once, among those that are there: it is not asked for again."""
        notes = []
        for name in ("prefill", "decode"):
            stage: StageObservation = getattr(observation, name)
            if not stage.num_starting or stage.num_ready > self._num_ready[name]:
                self._starting_since.pop(name, None)
            if stage.num_starting:
                since = self._starting_since.setdefault(name, now)
                if now - since > self._settings.ready_timeout_s:
                    notes.append(
                        f"{stage.num_starting} {name} not ready for {now - since:.0f} s: counted, not asked for again"
                    )
            if self._settings.target == "load":  # else corrections are learned by what was ready before
                self._num_ready[name] = stage.num_ready
        return notes

    # What is needed

    @property
    def _is_idle(self) -> bool:
        """Whether the load has ended: nothing came for longer than bursts like those before would be apart."""
        pause_s = self._num_idle * self._settings.interval_s
        if self._settings.idle_s is not None:
            return pause_s >= self._settings.idle_s
        return self._num_idle >= _IDLE_INTERVALS and pause_s > self._history.longest_pause_s

    def _is_quiet(self, observation: Observation) -> bool:
        assert observation.prefill is not None and observation.decode is not None
        return not (observation.num_requests or observation.prefill.num_waiting or observation.decode.num_waiting)

    def _needs_when_quiet(self, observation: Observation) -> tuple[int, int]:
        """The minimum, but one for what is under way: a drain waits only a while, and needs others to move it to."""
        assert observation.prefill is not None and observation.decode is not None
        bounds, stages = (self._settings.prefill, self._settings.decode), (observation.prefill, observation.decode)
        prefill, decode = (
            max(own.minimum, int(stage.num_running > 0)) for own, stage in zip(bounds, stages, strict=True)
        )
        return prefill, decode

    def _expected_loads(self, observation: Observation) -> dict[str, Load]:
        """Until workers that are asked for now are there, and the next decision; queues come on top.

        Of the prompts that wait, those which ready workers will have computed by then need no others.
        """
        assert self._lengths is not None and observation.prefill is not None and observation.decode is not None
        settings, interval_s = self._settings, observation.interval_s
        expected = max(self._predictor.predict(self._steps), 0.0) * settings.headroom
        prompt_s = self._engines["prefill"].prompt_ms(self._lengths[0]) / 1e3
        done = observation.prefill.num_ready * settings.start_s / max(prompt_s, 1e-9)
        waiting = max(observation.prefill.num_waiting - done, 0.0), observation.decode.num_waiting
        bursts = self._history.dispersion, self._history.busy_dispersion
        return {
            stage: Load(expected + count / interval_s, *self._lengths, *bursts)
            for stage, count in zip(("prefill", "decode"), waiting, strict=True)
        }

    def _needs_by_table(self, loads: dict[str, Load]) -> tuple[tuple[int, int], str]:
        settings, found, notes = self._settings, self.corrections, list[str]()
        prefill, decode = self._engines["prefill"], self._engines["decode"]
        if (share := _EASY_SHARE.get(settings.target)) is not None:
            num_prefill = _fewest(
                settings.prefill, lambda count: capacity.prefill_carries(prefill, loads["prefill"], count, share)
            )
            num_decode = _fewest(
                settings.decode, lambda count: capacity.decode_carries(decode, loads["decode"], count, share)
            )
        else:
            num_prefill = self._prefill_for_sla(loads["prefill"], notes)
            num_decode = self._decode_for_sla(loads["decode"], notes) + round(self.room.workers)
        load = max(loads.values(), key=lambda one: one.requests_per_s)
        why = (
            f"{load.requests_per_s:.2f} requests/s of {load.prompt_tokens:.0f}/{load.output_tokens:.0f} tokens need"
            f" {num_prefill}+{num_decode} ({settings.target}; corrections {found.ttft:.2f}, {found.itl:.2f};"
            f" bursts {load.dispersion:.1f}, {load.busy_dispersion:.1f}, room {self.room.workers:.1f})"
        )
        return (num_prefill, num_decode), "; ".join([why, *notes])

    def _prefill_for_sla(self, load: Load, notes: list[str]) -> int:
        """A target below what one prompt takes alone is out of reach of any number: then the load counts."""
        settings, engine, correction = self._settings, self._engines["prefill"], self.corrections.ttft
        alone_ms = engine.prompt_ms(load.prompt_tokens) * correction
        if alone_ms > settings.ttft_ms:
            notes.append(f"ttft_ms {settings.ttft_ms:.0f} is out of reach: a prompt alone takes {alone_ms:.0f}")
            return _fewest(settings.prefill, lambda count: capacity.prefill_carries(engine, load, count))
        return _fewest(
            settings.prefill,
            lambda count: capacity.prefill_fits(engine, load, count, settings.ttft_ms, correction),
        )

    def _decode_for_sla(self, load: Load, notes: list[str]) -> int:
        settings, engine, correction = self._settings, self._engines["decode"], self.corrections.itl
        alone_ms = engine.decode_ms(1, capacity.context_of(load)) * correction
        if alone_ms > settings.itl_ms:
            notes.append(f"itl_ms {settings.itl_ms:g} is out of reach: a request alone has {alone_ms:.1f}")
            return _fewest(settings.decode, lambda count: capacity.decode_carries(engine, load, count))
        return _fewest(
            settings.decode, lambda count: capacity.decode_fits(engine, load, count, settings.itl_ms, correction)
        )

    def _needs_by_queues(self, observation: Observation) -> tuple[tuple[int, int], str]:
        """One more or one less; nothing while workers start, whose queues are still the others'."""
        prefill, decode = observation.prefill, observation.decode
        assert prefill is not None and decode is not None
        waiting = prefill.num_waiting / max(prefill.num_ready, 1)
        by_prefill = (waiting > _WAITING_PROMPTS) - (waiting < _WAITING_PROMPTS / 4)
        has_queue = decode.num_waiting > 0
        fewer_kv = decode.kv_usage * decode.num_ready / max(decode.num_ready - 1, 1)
        by_decode = (decode.kv_usage > _HIGH_KV or has_queue) - (fewer_kv < _LOW_KV and not has_queue)
        needs = (
            max(prefill.num_workers + (0 if prefill.num_starting else by_prefill), 1),
            max(decode.num_workers + (0 if decode.num_starting else by_decode), 1),
        )
        why = f"{waiting:.1f} prompts wait a prefill worker, decode uses {decode.kv_usage:.0%} of its KV"
        return needs, f"{why}, {decode.num_waiting} wait there (load)"

    # What is done

    def _conclude(
        self, observation: Observation, now: float, needs: tuple[int, int], reasons: list[str]
    ) -> ScalingDecision:
        assert observation.prefill is not None and observation.decode is not None
        wanted = self._settings.within_budget(*needs)
        if wanted != needs:
            reasons.append(f"minimum, maximum and {self._settings.max_gpus} GPUs allow {wanted[0]}+{wanted[1]}")
        have = observation.prefill.num_workers, observation.decode.num_workers
        allowed = []
        for stage, one, count in zip(("prefill", "decode"), have, wanted, strict=True):
            direction = self._directions[stage]
            direction.needed(now, count)
            # From none one comes at once: without any, requests fail.
            found, against = direction.allow(now, one, count, self._is_idle) if one else (count, "")
            allowed.append(found)
            if against:
                reasons.append(f"{stage}: {against}")
        return self._decided(have, (allowed[0], allowed[1]), now, reasons)

    def _hold(self, observation: Observation, now: float, problem: str) -> ScalingDecision:
        if observation.prefill is not None and observation.decode is not None and not problem.startswith("absurd"):
            have = observation.prefill.num_workers, observation.decode.num_workers
        else:
            have = self._last or (self._settings.prefill.minimum, self._settings.decode.minimum)
        if problem.startswith(("stale", "nothing new", "clocks")) and self._last is not None:
            have = self._last
        return self._decided(have, have, now, [f"hold: {problem}"])

    def _decided(
        self, have: tuple[int, int], allowed: tuple[int, int], now: float, reasons: list[str]
    ) -> ScalingDecision:
        """Never above the budget, below the minimum, whatever is held."""
        final = self._settings.within_budget(*allowed)
        if final != allowed:
            reasons.append(f"within {self._settings.max_gpus} GPUs and bounds: {final[0]}+{final[1]}")
        for stage, before, after in zip(("prefill", "decode"), have, final, strict=True):
            self._directions[stage].went(now, after - before, self._is_idle)
        self._last = final
        return ScalingDecision(*final, "; ".join(reasons))


def _fewest(bounds: StageBounds, does: Callable[[int], bool]) -> int:
    return next((count for count in range(max(bounds.minimum, 1), bounds.maximum + 1) if does(count)), bounds.maximum)


def _smooth(known: float, found: float, weight: float) -> float:
    return known + weight * (found - known)


def _bounded(correction: float) -> float:
    return min(max(correction, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
