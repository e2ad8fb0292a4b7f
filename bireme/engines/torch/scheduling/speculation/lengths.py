"""How many tokens of each draft a step verifies: as many as pay, by acceptance and by what steps were found to take.

A draft's token is accepted if all before it were and it is right itself, with a probability that is taken to be the
same at each of its places. It is estimated for each sequence and kind of evidence from what was tried, the last trials
most, and begins where the engine's other sequences stand. A row more of a step makes that many tokens more, and takes
what a step of so many rows takes more: the rows with most hope are taken as long as tokens a second grow. Where none
pay, one draft in several is verified in part: the text may have come to where they are right. On a GPU all of a batch
are, since most of what that takes is the same for one and for all. There a batch of another size is also measured
before anything is believed of it: some steps without drafts, then some with whole ones. Who drafts at all is what
`budget.py` keeps account of.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from operator import itemgetter
from typing import Protocol

from bireme.engines.torch.scheduling.speculation.budget import DraftBudget
from bireme.engines.torch.scheduling.speculation.drafter import PassCosts
from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import Drafting, DraftOffer, SchedulerOutput, Sequence

_Hope = tuple[float, int, Sequence]
_of_hope = itemgetter(0)  # a sequence's own places stay in their order

_GAIN = 1.05  # in tokens a second, for which drafts begin: estimates err
_KEPT_GAIN = 1.01  # for which they go on
_PRIOR = 4.0  # trials that what is known of other sequences counts for
_FIRST = (3.0, 5.0)  # accepted and tried of a kind that nobody has tried
_FADES = 0.9  # of a sequence's trials, with each draft that is verified
_OF_ALL = 0.99  # of the engine's
_ESTIMATES = 16  # of a step's seconds, about so many: each takes the host some microseconds
_PROBE_EVERY = 16  # steps whose drafts are left
_PROBE = 2  # tokens of the one that is all the same
_LOOK_EVERY = 64  # steps before which nobody looks for drafts, once they do not pay
_LOOK_EVERY_MOST = 256  # the same, twice as many each time that they still do not
_DECIDED = 8  # steps at the most, for which lengths are decided: that takes the host a while
_IN_A_ROW = 4  # decisions of one step each, before
_KNOWN = 2  # steps of a size, of which one may have been an exception
_TRIES = 4  # of a size, that a step may turn out to have no room for


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

    @property
    def pays(self) -> bool:
        """Drafts paid when it was asked last; before that, they do where no step has to be measured first."""


class PromptsAlone:
    """Of an engine that drafts nothing, whose head sees each prompt for the engine that its KV goes to."""

    is_open = pays = True

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
        self._costs, self._verifying, self._most_s, self._drafting = costs, verifying, most_s, drafting
        self._shares = verifying is not costs  # a GPU's steps with drafts: rows share most of what they take
        self._budget = DraftBudget(costs, verifying)
        self.due, self.paid, self.gained = self._budget.due, self._budget.paid, self._budget.gained
        self._of_all = [_FIRST] * num_kinds
        self._num_left_out = self._num_unlooked = 0
        self._look_every = _LOOK_EVERY
        self._pays = False  # as it was found last
        self._decision = _Decision()
        self._tried: Counter[tuple[int, int]] = Counter()  # whole steps of a size

    @property
    def is_open(self) -> bool:
        return self._budget.is_open

    @property
    def pays(self) -> bool:
        return self._pays or not self._shares

    def choose(self, plan: SchedulerOutput, offers: Mapping[Sequence, DraftOffer]) -> dict[Sequence, int]:
        if self._is_new(plan):
            return {}
        if (again := self._decision.again(offers)) is not None:
            return again
        chosen = self._decide(plan, offers)
        if self._pays and self._shares and self._drafting is not None:
            self._decision.take(offers, chosen)
        else:
            self._decision = _Decision()
        return chosen

    def _decide(self, plan: SchedulerOutput, offers: Mapping[Sequence, DraftOffer]) -> dict[Sequence, int]:
        hopes = []
        for sequence, offer in offers.items():
            hopes += _hopes(sequence, self.rate(sequence, offer.kind), offer.num_tokens)
        if self._is_untried(plan, hopes, len(offers)):
            self._tried[_size_of(plan, hopes)] += 1
            self._pays, self._num_left_out = False, 0
            return {sequence: offer.num_tokens for sequence, offer in offers.items()}
        hopes.sort(key=_of_hope, reverse=True)
        count = self._most_that_pay(plan, hopes)
        self._pays = count > 0
        if not count:
            return self._probe(plan, offers)
        chosen: dict[Sequence, int] = {}
        for _, _, sequence in hopes[:count]:
            chosen[sequence] = chosen.get(sequence, 0) + 1
        return chosen

    def is_hopeful(self, plan: SchedulerOutput, most: Mapping[Sequence, int]) -> bool:
        due = set(self.due(plan))
        if not (most := {one: count for one, count in most.items() if one in due}) or self._is_new(plan):
            return False
        if self._is_to_look():
            return True
        hopes = self._unlooked(most)
        is_hopeful = self._is_untried(plan, hopes, len(most)) or self._most_that_pay(plan, hopes) > 0
        if is_hopeful:
            self._num_unlooked, self._look_every = 0, _LOOK_EVERY
        return is_hopeful

    def _unlooked(self, most: Mapping[Sequence, int]) -> list[_Hope]:
        hopes = []
        for sequence, count in most.items():
            found = sequence.drafting.found if sequence.drafting is not None else 1.0
            rate = max(self.rate(sequence, kind) for kind in range(len(self._of_all)))
            hopes += _hopes(sequence, rate, count, found)
        return sorted(hopes, key=_of_hope, reverse=True)

    def _is_to_look(self) -> bool:
        """Return whether so many steps have gone by that nobody expected anything of."""
        self._num_unlooked += 1
        if self._num_unlooked <= self._look_every:
            return False
        self._num_unlooked, self._num_left_out = 0, self._num_left_out + self._look_every
        self._look_every = min(2 * self._look_every, _LOOK_EVERY_MOST)
        return True

    def _is_new(self, plan: SchedulerOutput) -> bool:
        """Return whether it is not known what such a step takes without drafts, on a GPU."""
        return self._shares and not plan.chunks and self._costs.num_alike(StepWork.of(plan)) < _KNOWN

    def _is_untried(self, plan: SchedulerOutput, hopes: Collection[_Hope], num_sequences: int) -> bool:
        """Return whether it is not known what the step takes on a GPU with all of its drafts, and it may have them.

        `num_sequences`: that have some. Those of few of a batch tell nothing of it.
        """
        if not self._shares or plan.chunks or 2 * num_sequences < len(plan.decodes):
            return False
        work = StepWork.of(plan).with_rows(len(hopes))  # read once
        is_known = self._verifying.num_alike(work) >= _KNOWN or self._tried[_size_of(plan, hopes)] >= _TRIES
        return not is_known and self._is_allowed(work)

    def _is_allowed(self, work: StepWork) -> bool:
        """Return whether such a step with drafts takes no longer than a step may."""
        return not self._most_s or self._budget.verify_s(work) <= self._most_s

    def _most_that_pay(self, plan: SchedulerOutput, hopes: list[_Hope]) -> int:
        work = StepWork.of(plan)
        rows, context, tokens = work.decode_rows, work.context_tokens, float(len(plan.decodes))
        every = max(4, len(hopes) // _ESTIMATES)
        gain = _KEPT_GAIN if self._pays else _GAIN
        best, best_count = gain * tokens / self._costs.about_s(work), 0
        passes, times_read = _Passes(self._drafting), int(not self._shares)
        for count, (hope, place, sequence) in enumerate(hopes, 1):
            tokens += hope
            rows += 1
            context += times_read * sequence.computed
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

    def _probe(self, plan: SchedulerOutput, offers: Mapping[Sequence, DraftOffer]) -> dict[Sequence, int]:
        self._num_left_out += 1  # not for each draft: a large batch would probe, and land, step after step
        if self._num_left_out < _PROBE_EVERY:
            return {}
        self._num_left_out = 0
        if self._shares:
            whole = {sequence: offer.num_tokens for sequence, offer in offers.items()}  # so that all is measured again
            return whole if self._is_allowed(StepWork.of(plan).with_rows(sum(whole.values()))) else {}
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


def _size_of(plan: SchedulerOutput, hopes: Collection[_Hope]) -> tuple[int, int]:
    """Return about how many rows and tokens of context there are, by powers of two."""
    work = StepWork.of(plan)
    return (work.decode_rows + len(hopes)).bit_length(), work.context_tokens.bit_length()


class _Decision:
    """Lengths of a model's drafts that pay, and go on paying: the same sequences keep them for some steps."""

    def __init__(self) -> None:
        self._counts: dict[Sequence, int] = {}
        self._num_used, self._lasts = 0, -_IN_A_ROW  # steps

    def take(self, offers: Mapping[Sequence, DraftOffer], chosen: Mapping[Sequence, int]) -> None:
        self._lasts = min(self._lasts + 1, _DECIDED) if offers.keys() == self._counts.keys() else -_IN_A_ROW
        self._counts, self._num_used = {one: chosen.get(one, 0) for one in offers}, 0

    def again(self, offers: Mapping[Sequence, DraftOffer]) -> dict[Sequence, int] | None:
        """Return them once more; None: it is to be decided anew."""
        if self._num_used >= self._lasts or offers.keys() != self._counts.keys():
            return None
        self._num_used += 1
        return {one: count for one, offer in offers.items() if (count := min(self._counts[one], offer.num_tokens))}


class _Passes:
    """What a model's passes for drafts take together: one for each place, whose rows are of as many sequences."""

    def __init__(self, costs: PassCosts | None) -> None:
        """None: there are none."""
        self._costs = costs
        self._rows: list[int] = []
        self._contexts: list[int] = []

    def add(self, place: int, num_before: int) -> None:
        """Have one sequence more, of so many tokens, drafted at a place, from 1."""
        if place > len(self._rows):
            self._rows.append(0)
            self._contexts.append(0)
        self._rows[place - 1] += 1
        self._contexts[place - 1] += num_before

    def seconds(self) -> float:
        if self._costs is None:
            return 0.0
        return self._costs.before_s(list(map(StepWork, self._rows, itertools.repeat(0), self._contexts)))


def _hopes(sequence: Sequence, rate: float, count: int, hope: float = 1.0) -> list[_Hope]:
    """Return the probability that each of a draft's tokens is delivered, and its place, from 1."""
    return [(hope * rate**number, number, sequence) for number in range(1, count + 1)]
