"""Which workers serve a request.

A `Router` decides placements and is told how they went and which workers there are; pipelines keep no accounts of their
own. `RoundRobin` takes workers in turn and skips those known to be down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bireme.config import Recipe
from bireme.discovery.run import WorkerRecord, can_transfer
from bireme.errors import UnavailableError

DOWN_S = 1.0  # how long a lost worker is skipped, unless it is the only one


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: str | None  # None: aggregated, decode does both
    decode: str


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    prompt: npt.NDArray[np.int32]  # CPU 1D
    cache_salt: str = ""
    lora_name: str = ""
    priority: float = 0.5


class Router(Protocol):
    """Called on one loop's thread; must be quick."""

    def set_workers(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Take the whole present view: worker id (`decode_1`, or `decode_1@host:8001` on another server) -> record.

        Those that drain get nothing new. A worker that is missing has left or was lost; what runs there is its
        caller's.
        """

    def place(self, request: RoutingRequest, *, avoid: Collection[str] = ()) -> Placement:
        """Choose workers, none of `avoid` if there is another. Raises UnavailableError without a decode worker.

        `finished` must follow every placement.
        """

    def prefilled(self, placement: Placement) -> None:
        """The prefill worker has done its part."""

    def finished(self, placement: Placement) -> None:
        """Nothing of this placement is running any more."""

    def note_down(self, worker: str) -> None:
        """The worker was lost, or could not be reached."""

    def note_up(self, worker: str) -> None:
        """The worker has answered."""


class RoundRobin:
    """Each stage's workers in turn."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefill, self._decode = _Ring(prefill), _Ring(decode)
        self._clock = clock
        self._down_until: dict[str, float] = {}
        self._records: Mapping[str, WorkerRecord] = {}

    @classmethod
    def of(cls, recipe: Recipe) -> RoundRobin:
        return cls(recipe.replicas("prefill"), recipe.replicas("decode"))

    def set_workers(self, workers: Mapping[str, WorkerRecord]) -> None:
        self._records = workers
        for stage, ring in (("prefill", self._prefill), ("decode", self._decode)):
            ring.set([name for name, one in workers.items() if one.stage == stage and not one.is_draining])

    def place(self, request: RoutingRequest, *, avoid: Collection[str] = ()) -> Placement:
        skipped = {*avoid, *self._down()}
        decode = self._decode.take(skipped) or self._decode.take(avoid) or self._decode.take(())
        if decode is None:
            raise UnavailableError("no decode worker takes requests now; try again")
        return Placement(self._prefill.take(skipped | self._out_of_reach(decode)), decode)

    def prefilled(self, placement: Placement) -> None:
        pass

    def finished(self, placement: Placement) -> None:
        pass

    def note_down(self, worker: str) -> None:
        self._down_until[worker] = self._clock() + DOWN_S

    def note_up(self, worker: str) -> None:
        if self._down_until:
            self._down_until.pop(worker, None)

    def _out_of_reach(self, decode: str) -> set[str]:
        """Return the prefill workers whose KV can't get to a decode worker."""
        if (target := self._records.get(decode)) is None or not target.host:
            return set()
        return {name for name, source in self._records.items() if not can_transfer(source, target)}

    def _down(self) -> set[str]:
        if not self._down_until:
            return set()
        now = self._clock()
        self._down_until = {worker: until for worker, until in self._down_until.items() if until > now}
        return set(self._down_until)


class _Ring:
    """Names in turn."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._at = tuple(names), 0

    def set(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def take(self, skipped: Collection[str]) -> str | None:
        for offset in range(len(self._names)):
            name = self._names[(self._at + offset) % len(self._names)]
            if name not in skipped:
                self._at = (self._at + offset + 1) % len(self._names)
                return name
        return None
