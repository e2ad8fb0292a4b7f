"""What the engine's steps take, learned from those that have ended; pace, budget of prompts and load reports read it.

A step's work is counted in four numbers. Steps of about as much work (each number within a power of two) share a cell.
It keeps how the last of them compared with a simple form: a constant, and so much for each row, prompt token, token of
context, and look of a prompt's token at its context. None is less than zero, and the form is fitted to the cells.
Between cells their comparisons are interpolated; where none is near, the form alone says what a step takes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from bireme.engines.torch.step import SchedulerOutput

_Place = tuple[int, int, int]
_Means = tuple[float, float, float, float]  # of the work of several steps
_Form = tuple[float, float, float, float, float]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]

# Seconds: of a step, row, prompt token, token of context, look. An 8B model's on a GPU, until there are measurements.
_FIRST_FORM: _Form = (5e-3, 2e-5, 3e-5, 4e-8, 2e-9)
_MOST_CELLS = 256
_KEPT = 16  # steps of a cell
_FEW = 4  # steps of a cell that do not tell an exception from a rule
_FEW_MOST = 1.25  # times the form, that a cell of few steps is believed
_ONE_MOST = 3.0  # times the form, that a cell of one step is believed after a while without another
_FIT_EVERY = 1024
_FIRST_FIT = 8
_MOST_MS = 1e9  # of a step that is told
_PRIOR = 0.05  # weight of the first form, against that of one cell
_LEAST_SLOPE = 0.01  # of the first form's: more work is never free

_lengths = attrgetter("computed")


class StepWork(NamedTuple):
    decode_rows: int
    prefill_tokens: int
    context_tokens: int  # that decode rows read, and that stand before chunks of prompts
    looks: int = 0  # of prompts' tokens at those before them

    @classmethod
    def of(cls, plan: SchedulerOutput, has_drafts: bool = True, is_read_once: bool = False) -> StepWork:
        """`has_drafts`: with those of the plan. `is_read_once`: a sequence's rows read what is before them together."""
        work = cls(len(plan.decodes), 0, sum(map(_lengths, plan.decodes)))
        if has_drafts:
            for sequence, drafts in plan.drafts.items():
                work = work.with_rows(len(drafts), 0 if is_read_once else sequence.computed)
        for sequence, count in plan.chunks:
            work = work.with_chunk(plan.begin_of(sequence), count)
        return work

    def with_rows(self, count: int, before: int = 0) -> StepWork:
        rows, tokens, context, looks = self
        return StepWork(rows + count, tokens, context + count * before, looks)

    def with_chunk(self, before: int, count: int) -> StepWork:
        rows, tokens, context, looks = self
        return StepWork(rows, tokens + count, context + before, looks + count * before + count * count // 2)


class StepTime(msgspec.Struct, frozen=True):
    """One point of what is told of the table."""

    decode_rows: _Count
    prefill_tokens: _Count
    context_tokens: _Count
    ms: Annotated[float, msgspec.Meta(gt=0, lt=_MOST_MS)]
    prefill_context_tokens: _Count = 0  # of these, what prompts read, taken to be one

    @classmethod
    def of(cls, work: StepWork, seconds: float) -> StepTime:
        rows, tokens, context, looks = work
        own = round(looks / tokens - tokens / 2) if tokens else 0
        return cls(rows, tokens, context, round(1e3 * seconds, 4), min(max(own, 0), context))

    @property
    def work(self) -> StepWork:
        rows, tokens, context, own = (
            self.decode_rows,
            self.prefill_tokens,
            self.context_tokens,
            self.prefill_context_tokens,
        )
        return StepWork(rows, 0, context - own).with_chunk(own, tokens)


class _Cell:
    __slots__ = ("is_idle", "least", "most", "num", "ratios", "usual", "work")

    def __init__(self) -> None:
        self.work: _Means = (0.0, 0.0, 0.0, 0.0)
        self.ratios: deque[float] = deque(maxlen=_KEPT)  # of seconds to the form's
        self.num = 0
        self.is_idle = False  # nothing has come since the last fit
        self.least = self.usual = self.most = 1.0

    def add(self, work: StepWork, ratio: float) -> None:
        self.num += 1
        share = 1 / min(self.num, _KEPT)
        (a, b, c, d), (rows, tokens, context, looks) = self.work, work
        self.work = (
            a + share * (rows - a), b + share * (tokens - b), c + share * (context - c), d + share * (looks - d),
        )  # fmt: skip
        self.ratios.append(ratio)
        self.is_idle = False
        self.sort()

    def sort(self) -> None:
        ordered = sorted(self.ratios)
        last = len(ordered) - 1
        self.usual = ordered[last // 2]
        # Who waits for so long measures no less: of one step alone, which may be an exception, nothing is known.
        self.least = ordered[0] if self.num > 1 else 0.0
        # The largest is an exception: a kernel was compiled, a neighbor had the machine.
        self.most = ordered[last - max(1, last // 8)] if last + 1 >= _FEW else min(ordered[0], _FEW_MOST)

    def scaled(self, factor: float) -> _Cell:
        found = _Cell()
        found.work, found.num, found.is_idle = self.work, self.num, self.is_idle
        found.ratios.extend(ratio * factor for ratio in self.ratios)
        found.sort()
        return found

    def age(self) -> bool:
        """Forget the worst where no step has come: what nobody tries because it was slow would stay so for ever.

        False: nothing is left that is believed.
        """
        if self.is_idle and len(self.ratios) > 1:
            self.ratios.remove(max(self.ratios))
            self.sort()
        elif self.is_idle and self.usual > _ONE_MOST:
            return False
        self.is_idle = True
        return True


class _Table:
    """A form, and the cells that are compared with it. Who asks from another thread has both of the same fit."""

    __slots__ = ("cells", "form")

    def __init__(self, form: _Form, cells: dict[_Place, _Cell]) -> None:
        self.form, self.cells = form, cells

    def by_form(self, work: StepWork | _Means) -> float:
        constant, a_row, a_token, a_context, a_look = self.form
        rows, tokens, context, looks = work
        return constant + a_row * rows + a_token * tokens + a_context * context + a_look * looks

    def seconds(self, work: StepWork, which: str, unknown: float) -> float:
        """Return the form's seconds times a comparison of the cells around, `unknown` where there are none."""
        total = weight = 0.0
        cells, contexts = self.cells, _neighbors(work[2])
        pairs = itertools.product(_neighbors(work[0]), _neighbors(work[1]))
        for (rows, first), (tokens, second) in pairs:
            for context, third in contexts:
                if (cell := cells.get((rows, tokens, context))) is not None:
                    share = first * second * third
                    weight += share
                    total += share * getattr(cell, which)
        return self.by_form(work) * (total / weight if weight else unknown)

    def scaled_to(self, form: _Form) -> _Table:
        """Return the same cells, but those that nobody believes any more, compared with another form."""
        found = _Table(form, {})
        for place, cell in self.cells.items():
            scaled = cell.scaled(self.by_form(cell.work) / found.by_form(cell.work))
            if scaled.age():
                found.cells[place] = scaled
        return found


class StepCosts:
    """Changed by the engine's thread alone; other threads may ask."""

    def __init__(self, known: Iterable[StepTime] = ()) -> None:
        self.num_landed = 0
        self.most_prefill = 0  # tokens of prompts in a step that has been measured
        self._table = _Table(_FIRST_FORM, {})
        self._fits_at = _FIRST_FIT
        self._about: dict[_Place, float] = {}
        self._forget_at = 0  # of num_landed
        for one in known:
            self._add(one.work, one.ms / 1e3)
        if self._table.cells:
            self._fit()

    def landed(self, works: Sequence[StepWork], seconds: float) -> None:
        """Learn from steps that ended: of several, whose ends nobody saw, by what the form gives each."""
        total = sum(map(self._table.by_form, works)) if len(works) > 1 else 0.0
        for work in works:
            cell = self._add(work, seconds * self._table.by_form(work) / total if total else seconds)
            self.num_landed += 1
            if self.num_landed >= self._fits_at or cell.num == _FEW:
                self._fit()

    def num_alike(self, work: StepWork) -> int:
        """Return how many of the last steps with about as much work are known."""
        cell = self._table.cells.get(_place_of(work))
        return len(cell.ratios) if cell is not None else 0

    def least_s(self, work: StepWork) -> float:
        """Return what the quickest of the last such steps took; 0: there was one at most."""
        return self._table.seconds(work, "least", 0.0)

    def usual_s(self, work: StepWork) -> float:
        return self._table.seconds(work, "usual", 1.0)

    def about_s(self, work: StepWork) -> float:
        """Return `usual_s` as it was some steps ago, of about as much context: that takes a hundredth of the time."""
        if self.num_landed >= self._forget_at:
            self._forget_at = self.num_landed + _KEPT if self.num_landed > _KEPT else self.num_landed + 1
            self._about.clear()
        place = work.decode_rows, work.prefill_tokens, work.context_tokens >> 6
        seconds = self._about.get(place)
        if seconds is None:
            seconds = self._about[place] = self.usual_s(work)
        return seconds

    def most_s(self, work: StepWork) -> float:
        """Return what such a step hardly ever exceeds."""
        return self._table.seconds(work, "most", 1.0)

    def points(self) -> list[StepTime]:
        """Return a point for each cell, from any thread."""
        found, table = [], self._table
        for cell in list(table.cells.values()):
            work = StepWork(*map(round, cell.work))
            found.append(StepTime.of(work, cell.usual * table.by_form(work)))
        return sorted(found, key=lambda one: (one.prefill_tokens, one.decode_rows, one.context_tokens))

    def _add(self, work: StepWork, seconds: float) -> _Cell:
        place, cells = _place_of(work), self._table.cells
        cell = cells.get(place)
        if cell is None:
            if len(cells) >= _MOST_CELLS:
                del cells[min(cells, key=lambda one: cells[one].num)]
            cell = cells[place] = _Cell()
        cell.add(work, seconds / self._table.by_form(work))
        self.most_prefill = max(self.most_prefill, work.prefill_tokens)
        return cell

    def _fit(self) -> None:
        """Fit the form to what the cells say, by relative errors; what they don't tell, the first form says."""
        self._fits_at = self.num_landed + min(max(self.num_landed, _FIRST_FIT), _FIT_EVERY)
        cells, first = list(self._table.cells.values()), np.array(_FIRST_FORM)
        seconds = np.array([cell.usual * self._table.by_form(cell.work) for cell in cells])
        parts = np.array([(1.0, *cell.work) for cell in cells]) * first
        machine = float(np.median(seconds / parts.sum(1)))  # how much slower it is than the first form
        weights = np.sqrt([min(cell.num, _KEPT) / _KEPT for cell in cells])
        rows = np.vstack([parts / seconds[:, None] * weights[:, None], np.eye(5) * _PRIOR / machine])
        wanted = np.concatenate([weights, np.full(5, _PRIOR)])
        free, slopes = np.ones(5, bool), np.full(5, machine * _LEAST_SLOPE)
        while free.any():
            rest = wanted - rows[:, ~free] @ slopes[~free]
            slopes[free] = np.linalg.lstsq(rows[:, free], rest, rcond=None)[0]
            low = free & (slopes < machine * _LEAST_SLOPE)
            slopes[low] = machine * _LEAST_SLOPE
            free &= ~low
            if not low.any():
                break
        constant, a_row, a_token, a_context, a_look = (first * slopes).tolist()
        self._table = self._table.scaled_to((constant, a_row, a_token, a_context, a_look))


def _place_of(work: StepWork) -> _Place:
    rows, tokens, context, _ = work
    return rows.bit_length(), tokens.bit_length(), context.bit_length()


@functools.lru_cache(4096)
def _neighbors(number: int) -> tuple[tuple[int, float], ...]:
    """Return the powers of two whose middles stand around a number, with their shares of it."""
    if not number:
        return ((0, 1.0),)
    at = math.log2(number) + 0.5
    below = int(at)
    share = at - below
    return ((below, 1 - share), (below + 1, share)) if below else ((1, 1.0),)
