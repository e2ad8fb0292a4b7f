"""One decision of a planner, as it is told: a line of its log, metrics, the live page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from bireme.planner.observation import Observation
from bireme.scaling.connector import Sizes

PlanResult = Literal[
    "hold",  # what was observed can't be believed
    "same", "up", "down",
    "both",  # one stage up, the other down
]  # fmt: skip


class PlannedStage(msgspec.Struct, frozen=True, kw_only=True):
    ready: int
    starting: int
    ending: int
    wanted: int


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: not known."""

    at: float  # Unix time, s
    result: PlanResult
    reason: str
    acts: bool  # False: it advises
    max_gpus: int
    interval_s: float
    stages: dict[str, PlannedStage]  # {}: sizes are not known
    requests_per_s: float | None = None
    prompt_tokens: float | None = None  # of a request that are computed, the mean
    cached_tokens: float | None = None  # of its prompt, that caches had
    output_tokens: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    late_share: float | None = None  # of first tokens, that came certainly after the target
    slow_share: float | None = None  # of requests, whose mean gap was certainly above it
    done: list[str] = []  # what was begun
    failure: str = ""  # why it could not be begun

    def line(self) -> str:
        """Return it for a person."""
        sizes = ", ".join(
            f"{name} {one.ready}"
            + (f" and {one.starting} starting" if one.starting else "")
            + (f" and {one.ending} ending" if one.ending else "")
            + (f" -> {one.wanted}" if one.wanted != one.ready + one.starting else "")
            for name, one in self.stages.items()
            if any((one.ready, one.starting, one.ending, one.wanted))
        )
        told = f"{self.result}: {sizes or 'sizes are not known'} of {self.max_gpus} GPUs; {self.reason}"
        told += f"; {'; '.join(self.done)}" if self.done else ""
        return told + (f"; NOT DONE: {self.failure}" if self.failure else "")


def plan_record(
    observation: Observation, wanted: dict[str, int], sizes: Sizes | None, reason: str, is_held: bool, **told: object
) -> PlanRecord:
    stages = {
        stage: PlannedStage(
            ready=size.num_ready, starting=size.num_starting, ending=size.num_ending, wanted=wanted[stage]
        )
        for stage, size in (sizes or {}).items()
    }  # fmt: skip
    result = _result(stages)
    count, seconds = observation.num_requests, observation.interval_s
    return msgspec.convert(
        {
            "at": observation.at_s, "result": "hold" if is_held and result == "same" else result, "reason": reason,
            "interval_s": seconds, "stages": stages,
            "requests_per_s": count / seconds if count is not None and seconds > 0 else None,
            "prompt_tokens": observation.prompt_tokens, "cached_tokens": observation.cached_tokens,
            "output_tokens": observation.output_tokens,
            "ttft_ms": observation.ttft_ms, "itl_ms": observation.itl_ms,
            "late_share": observation.late_share, "slow_share": observation.slow_share, **told,
        },
        PlanRecord,
    )  # fmt: skip


def _result(stages: Mapping[str, PlannedStage]) -> PlanResult:
    changes = [one.wanted - one.ready - one.starting for one in stages.values()]
    goes_up, goes_down = max(changes, default=0) > 0, min(changes, default=0) < 0
    if goes_up and goes_down:
        return "both"
    return "up" if goes_up else "down" if goes_down else "same"


class DecisionLog:
    """A file to which each decision is appended, a line of JSON."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, record: PlanRecord) -> None:
        """A whole line at once, so that one who reads along never sees half of it. Raises OSError."""
        os.write(self._file, msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        os.close(self._file)
