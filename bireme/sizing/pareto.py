"""The front of what deployments reach: tokens/s a GPU against tokens/s a user, and where which of two is better.

A front is read as a staircase. Whoever promises each user so many tokens a second may run any point that gives as much
or more, and takes the one that gets most out of a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

EQUAL_WITHIN = 0.05  # of each other: what two runs of one cell differ by on a quiet machine
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
    """Return where which is better, from the smallest promise to the largest that one of both keeps."""
    fronts = front(first), front(second)
    bounds = sorted({point.per_user for points in fronts for point in points})
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
    one, other = best_at(first, up_to), best_at(second, up_to)
    if other is None:
        assert one is not None
        return Stretch(above, up_to, "first_only", points=(one.name,))
    if one is None:
        return Stretch(above, up_to, "second_only", points=(other.name,))
    ratio = one.per_gpu / other.per_gpu if other.per_gpu else float("inf")
    if 1 / (1 + equal_within) <= ratio <= 1 + equal_within:
        return Stretch(above, up_to, "equal")
    if ratio > 1:
        return Stretch(above, up_to, "first", ratio, ratio, (one.name,))
    ratio = 1 / ratio if ratio else float("inf")
    return Stretch(above, up_to, "second", ratio, ratio, (other.name,))


def _joined(one: Stretch, next_one: Stretch) -> Stretch:
    return Stretch(
        one.above,
        next_one.up_to,
        one.winner,
        min(one.ratio_low, next_one.ratio_low),
        max(one.ratio_high, next_one.ratio_high),
        tuple(dict.fromkeys((*one.points, *next_one.points))),
    )
