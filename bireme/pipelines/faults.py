"""What went wrong lately, as a pipeline saw it: the newest faults, and of many alike in a minute one with their number.

Who keeps them gives `Services` a log; without one nothing is noted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

MAX_FAULTS = 256
KEPT_S = 3600.0
SAME_S = 60.0  # of one kind at one worker, not further apart: one entry
MAX_REASON = 240  # characters

FaultKind = Literal[
    "engine_lost",  # a worker's engine ended; another one is started, unless it is to sleep
    "engine_restarted",
    "worker_left",
    "unreachable",  # a request could not be sent to it
    "migration",  # a request's tokens went on elsewhere
    "transfer_failed",
    "busy",  # a request was refused
]
SEEN_BY_ALL = frozenset({"engine_lost", "engine_restarted", "worker_left"})  # every process sees the one event


class Fault(msgspec.Struct):
    """One, or several alike."""

    at: float  # Unix time, s, of the first
    last_at: float
    count: int
    kind: FaultKind
    model: str
    worker: str  # "": no single one
    reason: str  # of the last


class FaultLog:
    """Used on one loop; the oldest make room."""

    def __init__(self, model: str, clock: Callable[[], float] = time.time) -> None:
        self._model, self._clock = model, clock
        self._faults: deque[Fault] = deque(maxlen=MAX_FAULTS)
        self._newest: dict[tuple[FaultKind, str], Fault] = {}

    def note(self, kind: FaultKind, worker: str, reason: str) -> None:
        now, reason = self._clock(), reason[:MAX_REASON]
        before = self._newest.get((kind, worker))
        if before is not None and now - before.at <= SAME_S:
            before.last_at, before.count, before.reason = now, before.count + 1, reason
            return
        fault = Fault(now, now, 1, kind, self._model, worker, reason)
        self._faults.append(fault)
        self._newest[kind, worker] = fault
        if len(self._newest) > MAX_FAULTS:  # workers that come and go under new names
            self._newest = {(one.kind, one.worker): one for one in self._faults}

    def faults(self) -> list[Fault]:
        """Return those of the last hour, the newest last."""
        since = self._clock() - KEPT_S
        return [fault for fault in self._faults if fault.last_at >= since]
