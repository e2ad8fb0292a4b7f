"""Workers of one launch, by its admin door: those that are not needed sleep, and their GPUs are free.

The launch is served with as many workers as there may ever be. To wake one takes as long as its engine's start. One
that is to sleep takes nothing new and ends with its requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bireme.config import stage_of
from bireme.errors import BiremeError, UnavailableError
from bireme.launch.admin_client import DoorClient
from bireme.scaling.connector import STAGES, Sizes, SourcePage, StageSize

_ASLEEP, _ENDING = "asleep", ("going to sleep", "draining")


class SleepingWorkers:
    """Connector."""

    def __init__(self, door: DoorClient) -> None:
        self._door = door

    def sizes(self) -> Sizes:
        return door_sizes(self._states())

    def pages(self) -> Sequence[SourcePage]:
        return door_pages(self._door)

    def scale(self, wanted: Mapping[str, int]) -> list[str]:
        states = self._states()
        return [line for stage, count in wanted.items() for line in self._scale_stage(stage, count, states)]

    def _scale_stage(self, stage: str, count: int, states: Mapping[str, Mapping[str, Any]]) -> list[str]:
        own = [name for name in states if stage_of(name) == stage]
        if len(own) < count:
            raise BiremeError(
                f"{stage}: {count} are wanted and the launch has {len(own)}; serve it with more replicas, or lower"
                f" {stage}.maximum"
            )
        to_sleep, to_wake = _chosen(own, states, count)
        for name in to_sleep:
            self._door.post("/sleep", worker=name, force=count == 0)
        for name in to_wake:
            self._door.post("/wake", worker=name)
        slept = [f"{name} sleeps once its requests have ended" for name in to_sleep]
        return slept + [f"{name} wakes" for name in to_wake]

    def _states(self) -> dict[str, dict[str, Any]]:
        return door_workers(self._door)


def door_workers(door: DoorClient) -> dict[str, dict[str, Any]]:
    """Return state and requests of a launch's workers of both stages. Raises BiremeError."""
    status = door.status()
    workers: dict[str, dict[str, Any]] = status.get("workers", {})
    if status.get("status") == "starting":
        raise UnavailableError(f"{door.address}: the launch is still starting")
    return {name: one for name, one in workers.items() if stage_of(name) in STAGES}


def door_sizes(workers: Mapping[str, Mapping[str, Any]]) -> dict[str, StageSize]:
    return {
        stage: size_of(one["state"] for name, one in workers.items() if stage_of(name) == stage) for stage in STAGES
    }


def size_of(states: Iterable[str]) -> StageSize:
    """A worker that is down counts as starting: its launch starts it again."""
    found = list(states)
    num_ready, num_ending = found.count("ready"), sum(found.count(state) for state in _ENDING)
    return StageSize(num_ready, len(found) - num_ready - num_ending - found.count(_ASLEEP), num_ending)


def door_pages(door: DoorClient) -> list[SourcePage]:
    """Raises BiremeError."""
    told = door.pages()
    if not told["pages"]:
        raise UnavailableError(f"{door.address}: its tritonserver is not there")
    return [SourcePage(door.address, "\n".join(told["pages"]), told["at"])]


def _chosen(names: Sequence[str], states: Mapping[str, Mapping[str, Any]], count: int) -> tuple[list[str], list[str]]:
    """Return which of a stage's workers are to sleep, and which to wake, so that so many are awake."""
    awake = [name for name in names if states[name]["state"] not in (_ASLEEP, *_ENDING)]
    sleeping = [name for name in names if states[name]["state"] in (_ASLEEP, "going to sleep")]
    return _idlest(awake, states)[: max(len(awake) - count, 0)], sleeping[: max(count - len(awake), 0)]


def _idlest(names: Sequence[str], states: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Those with the fewest requests first, of these the last ones."""
    ranks = {name: (int(states[name].get("in_flight_requests", 0)), -at) for at, name in enumerate(names)}
    return sorted(names, key=ranks.__getitem__)
