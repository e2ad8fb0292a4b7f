"""Who may draft before a step: sequences whose drafts gain more time than they take, and the others for 1.5% of theirs.

Each sequence has a credit in tokens: the time in which the engine says so many without drafts. Looks, passes of a model
and rows that are verified are paid from it as they were measured, and each accepted token is one that was not waited
for. Every token that is said lends 1.5% of one. All sequences together have a purse by these rules, in steps, that
lasts from one request to the next: a sequence may owe half of it. So one whose first drafts fail goes on where others'
pay, and is without, and tried again as often as the 1.5% allow, where they have lost what there was.
"""

from __future__ import annotations

from collections.abc import Collection

from bireme.engines.torch.scheduling.speculation.drafter import drafting_of
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import SchedulerOutput, Sequence

_LENT = 0.015  # of each token's time
_CREDIT = 4.0  # tokens, that a sequence saves at the most
_PREDICTED = 1.0  # tokens, that one begins with whose request predicts its output
_OWED = 0.5  # of the purse, that a sequence may owe
_PURSE = 32.0  # steps, that all save at the most
_DEBT = 24.0  # tokens or steps, that are owed at the most: one bill of a stalled host ends no drafts for minutes
_FIRST_PURSE = 16.0  # steps, to find out how good drafts are
_BILL = 4.0  # steps, that what is done before one costs at the most: a kernel was compiled, a neighbor had the machine
_FEW = 4  # steps with drafts, of which too little is known: they are taken to cost what others do


class DraftBudget:
    """Used by the engine's thread."""

    def __init__(self, costs: StepCosts, verifying: StepCosts | None = None) -> None:
        """`costs`: of steps without drafts; `verifying`: of those with, where that is measured apart."""
        self._costs, self._verifying = costs, verifying or costs
        self._purse = _FIRST_PURSE
        self._num_decodes = 1  # of the step that is planned

    @property
    def is_open(self) -> bool:
        """Drafts have gained more than they took, of all sequences together."""
        return self._purse > 0

    def due(self, plan: SchedulerOutput) -> list[Sequence]:
        """Return those of the step's sequences that may draft before it."""
        self._num_decodes = len(plan.decodes)
        return [one for one in plan.decodes if self._has_credit(one)]

    def _has_credit(self, one: Sequence) -> bool:
        drafting, said = one.drafting or drafting_of(one), len(one.tokens)
        if drafting.num_lent_for < 0:
            drafting.num_lent_for = said
            drafting.credit = _PREDICTED if drafting.num_predicted else 0.0
        if said > drafting.num_lent_for:
            self._add(one, _LENT * (said - drafting.num_lent_for))
            drafting.num_lent_for = said
        if drafting.num_predicted:
            return drafting.credit > 0
        return self._purse > 0 and drafting.credit + _OWED * self._purse > 0

    def _work_of(self, plan: SchedulerOutput) -> StepWork:
        return StepWork.of(plan, is_read_once=self._verifying is not self._costs)

    def verify_s(self, work: StepWork) -> float:
        """Return what a step with drafts takes."""
        return (self._verifying if self._verifying.num_landed >= _FEW else self._costs).about_s(work)

    def paid(self, plan: SchedulerOutput, due: Collection[Sequence], seconds: float, once_s: float = 0.0) -> None:
        """Pay for what was done before a step, and for what its drafts make it take more.

        `due`: for whom it was done; nobody: after the step, when its drafts are paid for already. `once_s`: of what
        a sequence needs once, whatever comes of it; all pay for it.
        """
        plain = StepWork.of(plan, has_drafts=False)
        step_s = self._costs.about_s(plain)
        self._take(due, min(seconds / step_s, _BILL))
        if due and plan.drafts:
            self._take(plan.drafts, max(0.0, self.verify_s(self._work_of(plan)) / step_s - 1))
        self._purse = max(-_DEBT, self._purse - once_s / step_s)

    def gained(self, sequence: Sequence, num_accepted: int) -> None:
        """Add what a step that was paid for has found to be right."""
        self._add(sequence, float(num_accepted))

    def _take(self, some: Collection[Sequence], steps: float) -> None:
        for one in some:
            self._add(one, -steps * self._num_decodes / len(some))

    def _add(self, one: Sequence, tokens: float) -> None:
        drafting = drafting_of(one)
        drafting.credit = max(-_DEBT, min(_CREDIT, drafting.credit + tokens))
        if not drafting.num_predicted:  # such a request drafts whatever others found, so it tells them nothing
            self._purse = max(-_DEBT, min(_PURSE, self._purse + tokens / self._num_decodes))
