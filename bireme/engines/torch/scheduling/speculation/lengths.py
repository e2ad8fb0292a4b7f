"""How many tokens of each draft a step verifies: as many as pay, by acceptance and by what steps were found to take.

A draft's token is accepted if all before it were and it is right itself, with a probability that is taken to be the
same at each of its places. It is estimated for each sequence and kind of evidence from what was tried, the last trials
most, and begins where the engine's other sequences stand. A row more of a step makes that many tokens more, and takes
what a step of so many rows takes more: the rows with most hope are taken as long as tokens a second grow. Where none
pay, one draft in several is verified in part: the text may have come to where they are right. Who drafts at all is what
`budget.py` keeps account of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from bireme.engines.torch.scheduling.speculation.budget import DraftBudget
from bireme.engines.torch.scheduling.speculation.drafter import PassCosts
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import Drafting, DraftOffer, SchedulerOutput, Sequence

_Hope = tuple[float, int, Sequence]

_GAIN = 1.05  # in tokens a second, for which drafts begin: estimates err
_KEPT_GAIN = 1.01  # for which they go on
_PRIOR = 4.0  # trials that what is known of other sequences counts for
_FIRST = (3.0, 5.0)  # accepted and tried of a kind that nobody has tried
_FADES = 0.9  # of a sequence's trials, with each draft that is verified
_OF_ALL = 0.99  # of the engine's
_ESTIMATES = 16  # of a step's seconds, about so many: each takes the host some microseconds
_PROBE_EVERY = 16  # steps whose drafts are left, where they are looked up; a model's are paid for otherwise
_PROBE = 2  # tokens of the one that is all the same
_LOOK_EVERY = 64  # steps before which nobody looks for drafts


class DraftLengths(Protocol):
    def due(self, plan: SchedulerOutput) -> Collection[Sequence]:
        """Return those of the sequences that drafts are looked for before this step."""

    def paid(self, plan: SchedulerOutput, due: Collection[Sequence], seconds: float, once_s: float = 0.0) -> None:
        """Learn what drafts took for those that were due: see DraftBudget."""

    def choose(self, plan: SchedulerOutput, offers: Mapping[Sequence, DraftOffer]) -> dict[Sequence, int]:
        """Return how many tokens of each draft the step verifies, at least one; of others none."""

    def is_hopeful(self, plan: SchedulerOutput, most: Mapping[Sequence, int]) -> bool:
        """Return whether drafts of so many tokens at the most, which nobody has looked for yet, may pay."""

    def gained(self, sequence: Sequence, num_accepted: int) -> None:
        """So many tokens of a draft were delivered."""

    def learn(self, sequence: Sequence, kind: int, num_tried: int, num_accepted: int) -> None:
        """Learn what a step found: the first `num_accepted` were right, and the one after it, if it was tried, not."""

    @property
    def is_open(self) -> bool:
        """Drafts have paid lately."""


class PromptsAlone:
    """Of an engine that drafts nothing, whose head sees each prompt for the engine that its KV goes to."""

    is_open = True

    def due(self, plan: SchedulerOutput) -> Collection[Sequence]:
        return ()

    def paid(self, plan: SchedulerOutput, due: Collection[Sequence], seconds: float, once_s: float = 0.0) -> None:
        return

    def choose(self, plan: SchedulerOutput, offers: Mapping[Sequence, DraftOffer]) -> dict[Sequence, int]:
        return {}

    def is_hopeful(self, plan: SchedulerOutput, most: Mapping[Sequence, int]) -> bool:
        return False

    def gained(self, sequence: Sequence, num_accepted: int) -> None:
        return

    def learn(self, sequence: Sequence, kind: int, num_tried: int, num_accepted: int) -> None:
        return


class MeasuredLengths:
    def __init__(
        self,
        costs: StepCosts,
        verifying: StepCosts,
        num_kinds: int,
        most_s: float = 0.0,
        drafting: PassCosts | None = None,
    ) -> None:
        """`verifying`: of steps that have drafts. `drafting`: of the passes that make them; None: they cost nothing.

        `most_s`: that a step may take with its drafts; 0: no bound.
        """
        self._costs, self._most_s, self._drafting = costs, most_s, drafting
        self._budget = DraftBudget(costs, verifying)
        self.due, self.paid, self.gained = self._budget.due, self._budget.paid, self._budget.gained
        self._of_all = [_FIRST] * num_kinds
        self._num_left_out = self._num_unlooked = 0
        self._pays = False  # as it was found last

    @property
    def is_open(self) -> bool:
        return self._budget.is_open

    def choose(self, plan: SchedulerOutput, offers: Mapping[Sequence, DraftOffer]) -> dict[Sequence, int]:
        hopes = []
        for sequence, offer in offers.items():
            hopes += _hopes(sequence, self.rate(sequence, offer.kind), offer.num_tokens)
        hopes.sort(key=lambda one: (-one[0], one[1]))
        count = self._most_that_pay(plan, hopes)
        self._pays = count > 0
        if not count:
            return self._probe(offers)
        chosen: dict[Sequence, int] = {}
        for _, _, sequence in hopes[:count]:
            chosen[sequence] = chosen.get(sequence, 0) + 1
        return chosen

    def is_hopeful(self, plan: SchedulerOutput, most: Mapping[Sequence, int]) -> bool:
        due = set(self.due(plan))
        if not (most := {one: count for one, count in most.items() if one in due}):
            return False
        self._num_unlooked += 1
        if self._num_unlooked > _LOOK_EVERY:
            self._num_unlooked, self._num_left_out = 0, self._num_left_out + _LOOK_EVERY
            return True
        hopes = []
        for sequence, count in most.items():
            found = sequence.drafting.found if sequence.drafting is not None else 1.0
            rate = max(self.rate(sequence, kind) for kind in range(len(self._of_all)))
            hopes += _hopes(sequence, rate, count, found)
        hopes.sort(key=lambda one: (-one[0], one[1]))
        is_hopeful = self._most_that_pay(plan, hopes) > 0
        if is_hopeful:
            self._num_unlooked = 0
        return is_hopeful

    def _most_that_pay(self, plan: SchedulerOutput, hopes: list[_Hope]) -> int:
        work = StepWork.of(plan)
        rows, context, tokens = work.decode_rows, work.context_tokens, float(len(plan.decodes))
        every = max(4, len(hopes) // _ESTIMATES)
        gain = _KEPT_GAIN if self._pays else _GAIN
        best, best_count = gain * tokens / self._costs.about_s(work), 0
        passes = _Passes(self._drafting)
        for count, (hope, place, sequence) in enumerate(hopes, 1):
            tokens += hope
            rows += 1
            context += sequence.computed
            if self._drafting is not None:
                passes.add(place, sequence.computed)
            if count & (count - 1) and count % every and count != len(hopes):
                continue  # of many lengths some are enough
            work = work._replace(decode_rows=rows, context_tokens=context)
            seconds = self._budget.verify_s(work) + passes.seconds()
            if self._most_s and seconds > self._most_s:
                break
            if tokens / seconds > best:
                best, best_count = tokens / seconds, count
        return best_count

    def _probe(self, offers: Mapping[Sequence, DraftOffer]) -> dict[Sequence, int]:
        self._num_left_out += 1  # not for each draft: a large batch would probe, and land, step after step
        if self._num_left_out < _PROBE_EVERY and self._drafting is None:
            return {}
        self._num_left_out = 0
        sequence, offer = max(offers.items(), key=lambda one: self.rate(one[0], one[1].kind))
        return {sequence: min(_PROBE, offer.num_tokens)}

    def rate(self, sequence: Sequence, kind: int) -> float:
        """Return the probability that a token of a draft of this kind is right."""
        before, of = self._of_all[kind]
        accepted, tried = sequence.drafting.trials.get(kind, (0.0, 0.0)) if sequence.drafting else (0.0, 0.0)
        return (accepted + _PRIOR * before / of) / (tried + _PRIOR)

    def learn(self, sequence: Sequence, kind: int, num_tried: int, num_accepted: int) -> None:
        trials = min(num_accepted + 1, num_tried)
        accepted, tried = self._of_all[kind]
        self._of_all[kind] = accepted * _OF_ALL + num_accepted, tried * _OF_ALL + trials
        drafting = sequence.drafting
        assert isinstance(drafting, Drafting)
        accepted, tried = drafting.trials.get(kind, (0.0, 0.0))
        drafting.trials[kind] = accepted * _FADES + num_accepted, tried * _FADES + trials


class _Passes:
    """What a model's passes for drafts take together: one for each place, whose rows are of as many sequences."""

    def __init__(self, costs: PassCosts | None) -> None:
        """None: there are none."""
        self._costs = costs
        self._works: list[StepWork] = []

    def add(self, place: int, num_before: int) -> None:
        """Have one sequence more, of so many tokens, drafted at a place, from 1."""
        if place > len(self._works):
            self._works.append(StepWork(0, 0, 0))
        self._works[place - 1] = self._works[place - 1].with_rows(1, num_before)

    def seconds(self) -> float:
        return self._costs.before_s(self._works) if self._costs is not None else 0.0


def _hopes(sequence: Sequence, rate: float, count: int, hope: float = 1.0) -> list[_Hope]:
    """Return the probability that each of a draft's tokens is delivered, and its place, from 1."""
    return [(hope * rate**number, number, sequence) for number in range(1, count + 1)]
