"""Which of two ways to serve is better where, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bireme.sizing.pareto import EQUAL_WITHIN, OperatingPoint, Stretch, compare


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve, and what it reached."""

    name: str  # as a sentence begins with it
    points: Sequence[OperatingPoint]


def verdict(first: Way, second: Way, unit: str = "GPU", equal_within: float = EQUAL_WITHIN) -> list[str]:
    """Return a sentence for each stretch of promises; `unit`: what tokens/s are divided by."""
    for way, other in ((first, second), (second, first)):
        if not way.points:
            return [f"{way.name} has no point that counts, so {other.name} can't be compared with it."]
    sentences = []
    for stretch in compare(first.points, second.points, equal_within):
        if stretch.winner == "equal":
            sentences.append(f"{_where(stretch)}: {first.name} and {second.name} are equal within {equal_within:.0%}.")
        else:
            sentences.append(_better(stretch, first.name, second.name, unit))
    return sentences


def _better(stretch: Stretch, first: str, second: str, unit: str) -> str:
    where = _where(stretch)
    better, other = (first, second) if stretch.winner.startswith("first") else (second, first)
    by = f" ({'; '.join(stretch.points)})"
    if stretch.winner.endswith("only"):
        return f"{where}: only {better} is as fast{by}; {other} never was."
    return f"{where}: {better} is better, {_ratio(stretch)} times the tokens/s a {unit} of {other}{by}."


def _where(stretch: Stretch) -> str:
    if not stretch.above:
        return f"Up to {stretch.up_to:,.1f} tokens/s for each user"
    return f"Above {stretch.above:,.1f}, up to {stretch.up_to:,.1f} tokens/s for each user"


def _ratio(stretch: Stretch) -> str:
    low, high = f"{stretch.ratio_low:.2f}", f"{stretch.ratio_high:.2f}"
    return low if low == high else f"{low} to {high}"
