"""A planner's turns: look, decide, act where it may, tell. What goes wrong in one is told, and the next one follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bireme.errors import BiremeError
from bireme.planner.observation import ScalingDecision
from bireme.planner.planner import WorkerPlanner
from bireme.scaling.connector import STAGES, Connector, Sizes
from bireme.scaling.observer import LiveObserver
from bireme.scaling.plan_record import PlanRecord, plan_record
from bireme.scaling.planner_file import PlannerFile

Teller = Callable[[PlanRecord], None]  # raises BiremeError, OSError: told, and no more


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

    def turn(self) -> PlanRecord:
        notes = self._follow_settings()
        observation = self._observer.observe()
        decision = self._planner.decide(observation, observation.at_s)
        sizes = self._observer.sizes
        wanted = self._wanted(decision, sizes)
        now = wanted
        if sizes is not None:
            now, late = self._within_gpus(wanted, sizes)
            notes += late
        done, failure = self._act(now, sizes)
        record = plan_record(
            observation, wanted, sizes, "; ".join([decision.reason, *notes]), decision.is_held,
            acts=self._acts, max_gpus=self._planner.settings.max_gpus, done=done, failure=failure,
        )  # fmt: skip
        for tell in self._tellers:
            try:
                tell(record)
            except (BiremeError, OSError) as error:
                self._complain(str(error))
        return record

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
