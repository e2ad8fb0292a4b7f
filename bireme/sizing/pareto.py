"""The front of what deployments reach: tokens/s a GPU against tokens/s a user, and where which of two is better.

A front is read as a staircase. Whoever promises each user so many tokens a second may run any point that gives as much
or more, and takes the one that gets most out of a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

EQUAL_WITHIN = 0.05  # of each other: what two runs of one cell differ by on a quiet machine
_ROUNDING = 1e-9
Winner = Literal["first", "second", "equal", "first_only", "second_only"]


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    per_user: float  # tokens/s that a user sees
    per_gpu: float  # tokens/s of all users together, over the GPUs
    name: str = ""  # of what runs, and under which load


@dataclass(frozen=True, slots=True)
class Stretch:
    """Promises to a user, in tokens/s, for which the comparison has one outcome."""

    above: float  # excluded
    up_to: float  # included
    winner: Winner
    ratio_low: float = 1.0  # of the better over the other; 1.0 where there is one alone
    ratio_high: float = 1.0
    points: tuple[str, ...] = ()  # of the better, those that reach it


def is_dominated(point: OperatingPoint, by: OperatingPoint) -> bool:
    return (by.per_user >= point.per_user and by.per_gpu > point.per_gpu) or (
        by.per_user > point.per_user and by.per_gpu >= point.per_gpu
    )


def front(points: Iterable[OperatingPoint]) -> list[OperatingPoint]:
    """Return the points that none dominates, by what a user sees; equal ones all stay."""
    found = list(points)
    kept = [point for point in found if not any(is_dominated(point, other) for other in found)]
    return sorted(kept, key=lambda point: (point.per_user, point.per_gpu, point.name))


def best_at(points: Sequence[OperatingPoint], per_user: float) -> OperatingPoint | None:
    """Return the point that gets most out of a GPU among those that give a user as much; None: no point does."""
    able = [point for point in points if point.per_user >= per_user]
    return max(able, key=lambda point: point.per_gpu, default=None)


def most_apart(
    first: Sequence[OperatingPoint], second: Sequence[OperatingPoint], from_per_user: float = 0.0
) -> tuple[OperatingPoint, OperatingPoint, float] | None:
    """Return the point of the first front, the second front's nearest to it by tokens/s a user, and the ratio of their
    tokens/s a GPU, where that ratio is largest; None: there is no pair.
    """
    pairs = []
    for point in (one for one in first if one.per_user >= from_per_user):
        able = [one for one in second if one.per_user >= from_per_user]
        nearest = min(able, key=lambda one: abs(one.per_user - point.per_user), default=None)
        if nearest is not None and point.per_gpu > 0 and nearest.per_gpu > 0:
            ratio = max(point.per_gpu / nearest.per_gpu, nearest.per_gpu / point.per_gpu)
            pairs.append((point, nearest, ratio))
    return max(pairs, key=lambda pair: pair[2], default=None)


def compare(
    first: Iterable[OperatingPoint], second: Iterable[OperatingPoint], equal_within: float = EQUAL_WITHIN
) -> list[Stretch]:
    """Return where which is better, from the smallest promise to the largest that one of both keeps.

    `equal_within`: a share, of tokens/s a user and a GPU. A point that misses a promise by less may keep it when it
    is measured again; the other is better only if it is better than that point as well.
    """
    fronts = front(first), front(second)
    kept = {point.per_user for points in fronts for point in points}
    bounds = sorted(kept | {late for one in kept if (late := one * (1 + equal_within)) < max(kept)})
    steps = [_step(*fronts, above, up_to, equal_within) for above, up_to in itertools.pairwise([0.0, *bounds])]
    stretches: list[Stretch] = []
    for step in steps:
        if stretches and stretches[-1].winner == step.winner:
            stretches[-1] = _joined(stretches[-1], step)
        else:
            stretches.append(step)
    return stretches


def _step(
    first: Sequence[OperatingPoint], second: Sequence[OperatingPoint], above: float, up_to: float, equal_within: float
) -> Stretch:
    missed_by_little = up_to / (1 + equal_within) * (1 - _ROUNDING)
    for points, others, winner in ((first, second, "first"), (second, first, "second")):
        best, rival = best_at(points, up_to), best_at(others, missed_by_little)
        if best is not None and rival is None:
            return Stretch(above, up_to, cast(Winner, f"{winner}_only"), points=(best.name,))
        if best is not None and rival is not None and best.per_gpu > rival.per_gpu * (1 + equal_within):
            ratio = best.per_gpu / rival.per_gpu if rival.per_gpu else float("inf")
            return Stretch(above, up_to, cast(Winner, winner), ratio, ratio, (best.name,))
    return Stretch(above, up_to, "equal")


def _joined(one: Stretch, next_one: Stretch) -> Stretch:
    return Stretch(
        one.above,
        next_one.up_to,
        one.winner,
        min(one.ratio_low, next_one.ratio_low),
        max(one.ratio_high, next_one.ratio_high),
        tuple(dict.fromkeys((*one.points, *next_one.points))),
    )
