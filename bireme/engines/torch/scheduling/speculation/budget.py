"""Who may draft before a step: sequences whose drafts gain more time than they take, and the others for 1.5% of theirs.

Each sequence has a credit in tokens: the time in which the engine says so many without drafts. Looks, passes of a model
and rows that are verified are paid from it as they were measured, and each accepted token is one that was not waited
for. Every token that is said lends 1.5% of one. So a sequence whose drafts lose time is soon without, and tried again
as often as that allows; one whose drafts pay goes on. All sequences together have a purse by these rules, in steps:
what they find lasts from one request to the next, and a request that begins where drafts lose has no credit to lose.
"""

from __future__ import annotations

from collections.abc import Collection

from bireme.engines.torch.scheduling.speculation.drafter import drafting_of
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import SchedulerOutput, Sequence

_LENT = 0.015  # of each token's time
_CREDIT = 4.0  # tokens, that a sequence saves at the most
_BEGINS = 1.0  # tokens, that one begins with at the most
_PURSE = 16.0  # steps, that all save at the most
_DEBT = 16.0  # tokens or steps, that are owed at the most: one bill of a stalled host ends no drafts for minutes
_FIRST_PURSE = 8.0  # steps, to find out how good drafts are
_BESIDE = 1.25  # times what is measured, that drafts take: steps between them lose what was in a CPU's caches
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
        drafting, said = drafting_of(one), len(one.tokens)
        if drafting.num_lent_for < 0:
            drafting.num_lent_for = said
            drafting.credit = _BEGINS if drafting.num_predicted else max(0.0, min(_BEGINS, self._purse / 4))
        lent = _LENT * (said - drafting.num_lent_for)
        drafting.num_lent_for = said
        self._add(one, lent)
        return drafting.credit > 0 and (self._purse > 0 or drafting.num_predicted > 0)

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
        self._take(due, seconds / step_s)
        if due and plan.drafts:
            self._take(plan.drafts, max(0.0, self.verify_s(StepWork.of(plan)) / step_s - 1))
        self._purse = max(-_DEBT, self._purse - once_s / step_s)

    def gained(self, sequence: Sequence, num_accepted: int) -> None:
        """Add what a step that was paid for has found to be right."""
        self._add(sequence, float(num_accepted))

    def _take(self, some: Collection[Sequence], steps: float) -> None:
        for one in some:
            self._add(one, -_BESIDE * steps * self._num_decodes / len(some))

    def _add(self, one: Sequence, tokens: float) -> None:
        drafting = drafting_of(one)
        drafting.credit = max(-_DEBT, min(_CREDIT, drafting.credit + tokens))
        if not drafting.num_predicted:  # such a request drafts whatever others found, so it tells them nothing
            self._purse = max(-_DEBT, min(_PURSE, self._purse + tokens / self._num_decodes))
