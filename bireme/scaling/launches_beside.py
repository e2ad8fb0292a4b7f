"""Launches of one worker beside one that serves anyway: what all share that start and end such launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from bireme.errors import BiremeError
from bireme.launch.admin_client import DoorClient
from bireme.scaling.connector import STAGES, Sizes, SourcePage, StageSize
from bireme.scaling.sleeping_workers import door_pages, door_sizes, door_workers

_READY = ("ready", "degraded")


class BesideLaunch(Protocol):
    @property
    def stage(self) -> str: ...

    @property
    def slot(self) -> int:
        """Return a number that no other has."""
        ...

    @property
    def is_ending(self) -> bool: ...


class LaunchesBeside(ABC):
    """Connector."""

    def __init__(self, door: DoorClient) -> None:
        """`door`: of the launch that is there anyway; those beside it have doors with the same key."""
        self._door = door

    @abstractmethod
    def _alive(self) -> Sequence[BesideLaunch]:
        """Raises BiremeError."""

    @abstractmethod
    def _address_of(self, launch: BesideLaunch) -> str:
        """Return its door's; "": it is not known yet. Raises BiremeError."""

    @abstractmethod
    def _start(self, stage: str) -> str:
        """Return what was begun. Raises BiremeError."""

    @abstractmethod
    def _end(self, launch: BesideLaunch) -> str:
        """Return what was begun. Raises BiremeError."""

    def sizes(self) -> Sizes:
        own, alive = door_sizes(door_workers(self._door)), self._alive()
        return {stage: _added(own[stage], self._size([one for one in alive if one.stage == stage])) for stage in STAGES}

    def pages(self) -> Sequence[SourcePage]:
        """A launch that starts or ends need not answer."""
        found = door_pages(self._door)
        for one in self._alive():
            if (door := self._door_of(one)) is None:
                continue
            try:
                found += door_pages(door)
            except BiremeError:
                if not one.is_ending and self._is_ready(one):
                    raise
        return found

    def scale(self, wanted: Mapping[str, int]) -> list[str]:
        own, done = door_sizes(door_workers(self._door)), list[str]()
        for stage, count in wanted.items():
            launches = [one for one in self._alive() if one.stage == stage and not one.is_ending]
            if count < (least := own[stage].num_workers):
                raise BiremeError(
                    f"{stage}: {count} are wanted and the launch itself has {least}; set {stage}.minimum to that"
                )
            more = count - least - len(launches)
            done += [self._start(stage) for _ in range(more)]
            launches.sort(key=lambda one: (self._is_ready(one), -one.slot))  # those that start end first
            done += [self._end(one) for one in launches[: max(-more, 0)]]
        return done

    def _size(self, launches: Sequence[BesideLaunch]) -> StageSize:
        ending = sum(one.is_ending for one in launches)
        ready = sum(self._is_ready(one) for one in launches if not one.is_ending)
        return StageSize(ready, len(launches) - ending - ready, ending)

    def _is_ready(self, launch: BesideLaunch) -> bool:
        try:
            return (door := self._door_of(launch)) is not None and door.status()["status"] in _READY
        except BiremeError:
            return False

    def _door_of(self, launch: BesideLaunch) -> DoorClient | None:
        address = self._address_of(launch)
        return DoorClient(address, self._door.key) if address else None


def _added(one: StageSize, other: StageSize) -> StageSize:
    return StageSize(
        one.num_ready + other.num_ready, one.num_starting + other.num_starting, one.num_ending + other.num_ending
    )
