"""What a planner acts through: one interface, and what all that implement it share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

STAGES = ("prefill", "decode")
AGGREGATED = ("decode",)  # the only stage where its workers compute prompts as well


@dataclass(frozen=True, slots=True)
class StageSize:
    """Workers of one stage, each counted once."""

    num_ready: int = 0
    num_starting: int = 0  # asked for, and not ready yet
    num_ending: int = 0  # told to end: they take nothing new, finish what they have, and hold their GPUs until then

    @property
    def num_workers(self) -> int:
        """Those that serve, or are to."""
        return self.num_ready + self.num_starting


Sizes = Mapping[str, StageSize]  # by stage


@dataclass(frozen=True, slots=True)
class SourcePage:
    """Prometheus' text of one process, or of several that are one source."""

    source: str  # names it, the same at each look
    text: str
    at_s: float | None = None  # Unix time of its host; None: not told


class Connector(Protocol):
    """One deployment. One call at a time."""

    def sizes(self) -> Sizes:
        """Raises BiremeError where that can't be told."""
        ...

    def pages(self) -> Sequence[SourcePage]:
        """Return metrics of all that is there. Raises BiremeError: without one of them the sums would be wrong."""
        ...

    def scale(self, wanted: Mapping[str, int]) -> list[str]:
        """Begin to go to so many workers of each stage, and return what was begun. Who ends is drained first.

        Raises BiremeError for what is refused; what was begun until then goes on.
        """
        ...
