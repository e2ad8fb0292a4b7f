"""The interface of what proposes tokens; the step that verifies them decides, so a drafter may be wrong at no risk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Works
from typing import Protocol

import torch

from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import Draft, Drafting, Sequence

_LONG = 32  # tokens of a pass, that are not only those of the last steps: a prompt is caught up on


class PassCosts(StepCosts):
    """What a drafter's passes take, and what of the last ones was to catch up."""

    def __init__(self, device: torch.device, has_rounds: bool = False) -> None:
        """`has_rounds`: all passes for a step's drafts are one launch, which nobody waits for."""
        super().__init__()
        self.at_once = StepCosts() if has_rounds else None  # of launches, by sequences alone: what the host takes
        # Who waits for a GPU takes no CPU; on a busy machine the clock goes on while others have the CPU.
        self.now = time.monotonic if device.type == "cuda" else time.thread_time
        self.begin()

    def begin(self) -> None:
        """Passes for other drafts follow."""
        self.catch_up_s = 0.0  # that is taken by what was not seen of long sequences

    def passed(self, work: StepWork, began_at: float, is_seen: bool = True) -> None:
        """`began_at`: by `now`. `is_seen`: the pass has ended by now."""
        if not is_seen:
            self.catch_up_s += self.now() - began_at
            return
        self.landed([work], self.now() - began_at)
        if work.prefill_tokens > _LONG:
            self.catch_up_s += self.about_s(work)

    def launched(self, num_sequences: int, seconds: float) -> None:
        """All passes for the drafts of so many sequences were one launch, which took the host so long."""
        assert self.at_once is not None
        self.at_once.landed([StepWork(num_sequences, 0, 0)], seconds)

    def before_s(self, works: Works[StepWork]) -> float:
        """Return what a step waits for, before which there are these passes, one for each place of drafts."""
        if self.at_once is None:
            return sum(map(self.about_s, works))
        if not works or not self.at_once.num_landed:
            return 0.0
        return self.at_once.about_s(StepWork(works[0].decode_rows, 0, 0))


class Drafter(Protocol):
    """Used by the engine's thread, between steps."""

    num_kinds: int  # of evidence that a draft may rest on

    @property
    def costs(self) -> PassCosts | None:
        """Of its forward passes, one for each place of a draft; None: drafts are looked up."""

    def room(self, sequence: Sequence) -> int:
        """Return the most tokens that it may propose now."""

    def propose(self, most: Mapping[Sequence, int], budget: int) -> dict[Sequence, Draft]:
        """Return drafts of at most so many tokens, at least one, for those sequences that it has any for.

        `budget`: tokens that forward passes may take to catch up on what they have not seen of the sequences.
        """


def drafting_of(sequence: Sequence) -> Drafting:
    if sequence.drafting is None:
        sequence.drafting = Drafting.with_prediction(sequence.request.prediction)
    return sequence.drafting
