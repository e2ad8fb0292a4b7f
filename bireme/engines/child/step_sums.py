"""Sums over a step's rows and over the queue, for step records, without a look at each row in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import mul
from typing import Generic, TypeVar

from bireme.kv.wire.step_records import NOTHING_QUEUED, QueuedRequests

_R = TypeVar("_R")


@dataclass(slots=True)
class Sums:
    """Of lengths: how many, their sum, and that of their squares."""

    num: int = 0
    total: int = 0
    squares: int = 0

    @classmethod
    def of(cls, lengths: list[int]) -> Sums:
        return cls(len(lengths), sum(lengths), sum(map(mul, lengths, lengths)))

    @property
    def variance(self) -> float:
        """Of the whole population; exact until the division."""
        return (self.num * self.squares - self.total**2) / self.num**2 if self.num > 1 else 0.0

    def add(self, length: int) -> None:
        self.num += 1
        self.total += length
        self.squares += length * length

    def remove(self, length: int) -> None:
        self.num -= 1
        self.total -= length
        self.squares -= length * length


class DecodeSums(Generic[_R]):
    """Sums over the KV tokens of a step's decode rows. Those that stay for the next step have one more then."""

    def __init__(self) -> None:
        self._rows: list[_R] = []
        self.sums = Sums()  # of the step that was counted last

    def count(self, rows: list[_R], lengths_of: Callable[[list[_R]], list[int]]) -> bool:
        """Count the rows of a step; return whether they are those of the step before."""
        sums, is_same = self.sums, rows == self._rows
        if is_same:
            sums.squares += 2 * sums.total + sums.num
            sums.total += sums.num
        else:
            self._rows, self.sums = rows, Sums.of(lengths_of(rows))
        return is_same

    def forget(self) -> None:
        """The rows that stay have more than one more."""
        self._rows = []


class QueueSums:
    """Sums over the queue, kept as requests come and go: both tell the same of a request."""

    def __init__(self) -> None:
        self._prefill, self._decode = Sums(), Sums()
        self._told: QueuedRequests | None = NOTHING_QUEUED  # None: to be made again

    def add(self, length: int, is_decode: bool) -> None:
        (self._decode if is_decode else self._prefill).add(length)
        self._told = None

    def remove(self, length: int, is_decode: bool) -> None:
        (self._decode if is_decode else self._prefill).remove(length)
        self._told = None

    @property
    def requests(self) -> QueuedRequests:
        if self._told is None:
            prefill, decode = self._prefill, self._decode
            self._told = QueuedRequests(
                prefill.num, prefill.total, prefill.variance, decode.num, decode.total, decode.variance
            )
        return self._told
