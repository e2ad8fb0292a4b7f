"""Which sequences are looked for drafts: those where that pays, and the others now and then.

To look, and to choose how much of a draft is verified, takes the host as long whatever the model: of a step of 5 ms it
is a hundredth, of one of 0.7 ms a tenth. What it takes is measured, and so is what a sequence's looks have gained.
"""

from __future__ import annotations

from collections.abc import Mapping

from bireme.engines.torch.scheduling.speculation.drafter import drafting_of
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import Drafting, SchedulerOutput, Sequence

_REST = 16  # steps of a sequence whose looks do not pay, for each look
_FADES = 1 / 16  # of what its looks have gained, with each look
_OF_ALL = 1 / 256  # of all sequences'
_FEW = 32  # looks that do not tell yet what one takes
_HOPE = 2.0  # times what a look has to gain, that a sequence begins with at the most: some looks tell
_RISES, _FALLS = 1 / 64, 1 / 4  # what a look usually takes: the first, and others now and then, take many times that


class Looks:
    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._gained = 1.0  # tokens a look, of all sequences
        self._look_s = 0.0  # CPU, of one sequence
        self._num_looks = 0
        self._least = 0.0  # tokens that a look has to gain

    def due(self, most: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Return those of the sequences that are looked for before this step."""
        return {one: count for one, count in most.items() if self._is_due(drafting_of(one))}

    def _is_due(self, drafting: Drafting) -> bool:
        if drafting.gained is None:
            drafting.gained = 1.0 if drafting.num_predicted else self._begin()
        drafting.num_unlooked += 1
        if drafting.gained < self._least and drafting.num_unlooked < _REST:
            return False
        gained = drafting.num_accepted - drafting.num_told
        drafting.num_told, drafting.num_unlooked = drafting.num_accepted, 0
        drafting.gained += _FADES * (gained - drafting.gained)
        self._gained += _OF_ALL * (gained - self._gained)
        return True

    def _begin(self) -> float:
        """Return what a sequence's looks are taken to have gained before the first: what others' did, within reason."""
        return min(self._gained, _HOPE * self._least) if self._least else self._gained

    def took(self, plan: SchedulerOutput, num: int, seconds: float) -> None:
        """Learn what it took the host to look for so many, before this step."""
        share = (_FALLS if seconds / num < self._look_s else _RISES) if self._look_s else 1.0
        self._look_s += share * (seconds / num - self._look_s)
        a_token_s = self._costs.usual_s(StepWork.of(plan)) / len(plan.decodes)
        self._num_looks += 1
        if self._num_looks >= _FEW:
            self._least = self._look_s / a_token_s
