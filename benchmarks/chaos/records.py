"""What a campaign saw. All times are of the monotonic clock, which the processes of a machine share."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.chaos.faults import Fault

Outcome = Literal["ok", "dropped", "failed", "wrong", "hung"]


@dataclass(frozen=True, slots=True)
class Request:
    way: str
    began: float
    ended: float
    outcome: Outcome
    error: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    way: str
    sent: float
    ended: float
    error: str = ""  # "": it was answered, and rightly


@dataclass(frozen=True, slots=True)
class Readiness:
    at: float
    status: str  # ready, degraded, not_ready, ...; "silent": no answer
    is_ready: bool  # HTTP 200


@dataclass(frozen=True, slots=True)
class Delay:
    """The observing process was not run by the machine for so long."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ServerDeath:
    """tritonserver is another process since this moment."""

    at: float


@dataclass(slots=True)
class Seen:
    """Everything that the load process told, in its order; and the deaths, which the campaign sees itself."""

    requests: list[Request] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    readiness: list[Readiness] = field(default_factory=list)
    delays: list[Delay] = field(default_factory=list)
    deaths: list[ServerDeath] = field(default_factory=list)

    def delay_s(self, begin: float, end: float) -> float:
        """Return how long the machine kept the observer from looking between two moments."""
        return sum(delay.seconds for delay in self.delays if begin <= delay.at <= end + delay.seconds)


@dataclass(slots=True)
class Hit:
    """One fault as it happened."""

    fault: Fault
    began: float
    over: float  # when nothing more was done: a pause has ended, the log is read again
    recovered: float | None = None  # when all was well again; None: not within the time that it has
    gave_up: float | None = None  # when its recovery was waited for no longer
    requests: Counter[str] = field(default_factory=Counter)  # outcome -> how many that ran meanwhile

    @property
    def recovery_s(self) -> float | None:
        return None if self.recovered is None else self.recovered - self.over

    def window(self) -> tuple[float, float]:
        """Return the time in which requests can suffer from it."""
        end = self.recovered or self.gave_up
        return self.began, math.inf if end is None else end
