"""A planner's turns: look, decide, act where it may, tell. What goes wrong in one is told, and the next one follows.

Each interval has a decision or a hold that is told, however slow or broken what it looks at is: a turn that takes
longer than an interval is told as a hold while it lasts.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from bireme.errors import BiremeError
from bireme.planner.observation import ScalingDecision
from bireme.planner.planner import WorkerPlanner
from bireme.scaling.connector import STAGES, Connector, Sizes
from bireme.scaling.observer import LiveObserver, Targets
from bireme.scaling.plan_record import PlanRecord, plan_record
from bireme.scaling.planner_file import PlannerFile

Teller = Callable[[PlanRecord], None]  # raises BiremeError, OSError: told, and no more. Of any thread
_END_S = 20.0  # for a turn under way when the planner is told to end


class PlannerLoop:
    def __init__(
        self,
        planner: WorkerPlanner,
        observer: LiveObserver,
        connector: Connector,
        tellers: Sequence[Teller],
        *,
        acts: bool,
        settings_file: PlannerFile | None = None,
        complain: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`complain`: takes what could not be told elsewhere."""
        self._planner, self._observer, self._connector = planner, observer, connector
        self._tellers, self._acts, self._settings_file, self._complain = tellers, acts, settings_file, complain

    def run(self, interval_s: float, most: float, stopping: threading.Event) -> None:
        """Take a turn an interval, the first after one, until `stopping` or as often as asked."""
        num_turns, began, next_at = 0, 0.0, time.monotonic() + interval_s
        turn: threading.Thread | None = None
        while num_turns < most and not stopping.wait(max(next_at - time.monotonic(), 0.0)):
            next_at = max(next_at + interval_s, time.monotonic())  # one that came late is not made up for
            if turn is not None and turn.is_alive():
                seconds = time.monotonic() - began
                self._tell(self._held(f"missing: the last turn's look or what it began takes {seconds:.0f} s so far"))
                continue
            turn, began = threading.Thread(target=self.turn, name="planner-turn", daemon=True), time.monotonic()
            turn.start()
            num_turns += 1
        if turn is not None:
            turn.join(_END_S)

    def turn(self) -> PlanRecord:
        try:
            record = self._turn()
        except Exception as error:  # a planner that has died decides nothing: the next look may be another one
            self._complain(traceback.format_exc())
            record = self._held(f"failed: {type(error).__name__}: {error}")
        self._tell(record)
        return record

    def _held(self, problem: str) -> PlanRecord:
        """Return what stands for a decision that was not made."""
        settings = self._planner.settings
        return PlanRecord(
            at=time.time(), result="hold", reason=f"hold: {problem}", acts=self._acts, max_gpus=settings.max_gpus,
            interval_s=settings.interval_s, stages={},
        )  # fmt: skip

    def _tell(self, record: PlanRecord) -> None:
        for tell in self._tellers:
            try:
                tell(record)
            except (BiremeError, OSError) as error:
                self._complain(str(error))

    def _turn(self) -> PlanRecord:
        notes = self._follow_settings()
        settings = self._planner.settings
        targets = Targets(settings.ttft_ms, settings.itl_ms) if settings.target == "sla" else None
        observation = self._observer.observe(targets)
        notes += self._observer.inexact
        decision = self._planner.decide(observation, observation.at_s)
        sizes = self._observer.sizes
        wanted = self._wanted(decision, sizes)
        now = wanted
        if sizes is not None:
            now, late = self._within_gpus(wanted, sizes)
            notes += late
        done, failure = self._act(now, sizes)
        return plan_record(
            observation, wanted, sizes, "; ".join([decision.reason, *notes]), decision.is_held,
            acts=self._acts, max_gpus=self._planner.settings.max_gpus, done=done, failure=failure,
        )  # fmt: skip

    def _follow_settings(self) -> list[str]:
        if self._settings_file is None:
            return []
        try:
            if (changed := self._settings_file.changed()) is None:
                return []
            self._planner.set_bounds(changed)
        except BiremeError as error:
            return [f"settings as before: {error}"]
        return [f"settings anew: {changed.max_gpus} GPUs"]

    def _wanted(self, decision: ScalingDecision, sizes: Sizes | None) -> dict[str, int]:
        """Where nothing is decided sizes stay as they are, but for a budget that has become smaller."""
        found = {"prefill": decision.prefill, "decode": decision.decode}
        if decision.is_held and sizes is not None:
            have = {stage: sizes[stage].num_workers for stage in STAGES}
            least = self._planner.settings.within_budget(**have)
            found = {stage: min(have[stage], count) for stage, count in zip(STAGES, least, strict=True)}
        return found

    def _within_gpus(self, wanted: Mapping[str, int], sizes: Sizes) -> tuple[dict[str, int], list[str]]:
        """Who ends holds its GPUs until it has ended: so long nobody takes its place beyond the budget."""
        settings = self._planner.settings
        gpus = {"prefill": settings.prefill.gpus, "decode": settings.decode.gpus}
        held = {stage: sizes[stage].num_workers + sizes[stage].num_ending for stage in STAGES}
        left = settings.max_gpus - sum(gpus[stage] * held[stage] for stage in STAGES)
        now, late = dict(wanted), []
        for stage in STAGES:
            more = max(wanted[stage] - sizes[stage].num_workers, 0)
            some = min(more, max(left, 0) // gpus[stage])
            left -= some * gpus[stage]
            if some < more:
                now[stage] -= more - some
                late.append(f"{stage}: {more - some} more once others have ended and their GPUs are free")
        return now, late

    def _act(self, now: Mapping[str, int], sizes: Sizes | None) -> tuple[list[str], str]:
        if not self._acts or sizes is None or all(now[stage] == sizes[stage].num_workers for stage in STAGES):
            return [], ""
        try:
            return self._connector.scale(now), ""
        except BiremeError as error:
            return [], str(error)
