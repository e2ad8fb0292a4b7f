"""How many workers there are while a simulation runs, and what whoever decides that sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StageLoad:
    """A stage's workers as their own reports have them."""

    num_ready: int
    num_starting: int
    num_running: int  # requests
    num_waiting: int
    waiting_tokens: int  # prompt tokens that are still to be computed
    kv_usage: tuple[float, ...]  # of each that is ready
    queues: tuple[int, ...]  # waiting tokens, of each


@dataclass(frozen=True, slots=True)
class IntervalFigures:
    """What came, and what became of it, since the interval before."""

    at_s: float  # its end
    interval_s: float
    num_arrived: int
    num_refused: int
    num_ended: int
    num_prompts: int  # that have been computed
    prompt_tokens: int  # of these
    cached_tokens: int
    output_tokens: int  # of those that ended
    ttft_s: tuple[float, ...]  # of first tokens in it
    itl_s: tuple[float, ...]  # of requests that ended, the mean of each
    prefill: StageLoad
    decode: StageLoad
    num_late: int = 0  # of the first tokens, after the target
    num_slow: int = 0  # of those that ended, with gaps above the target


class Scaler(Protocol):
    def on_interval(self, figures: IntervalFigures) -> tuple[int, int]:
        """Return how many workers of prefill and decode there should be; none of both: asleep."""
        ...
