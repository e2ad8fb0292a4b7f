"""The interface of what proposes tokens; the step that verifies them decides, so a drafter may be wrong at no risk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from bireme.engines.torch.scheduling.step_costs import StepCosts
from bireme.engines.torch.step import Draft, Drafting, Sequence


class Drafter(Protocol):
    """Used by the engine's thread, between steps."""

    num_kinds: int  # of evidence that a draft may rest on
    costs: StepCosts | None  # of its forward passes, one for each place of a draft; None: drafts are looked up

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
