"""What a dashboard shows, before Grafana's own objects: panels in rows, each of its queries, unit and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grafana_foundation_sdk.models import units

from bireme.metrics import TABLE
from tools.dashboards.queries import (
    ALL,
    EACH,
    Choice,
    Combine,
    Query,
    amount,
    buckets,
    events,
    level,
    quantile,
    share,
    spent,
)

QUANTILES = (0.5, 0.95, 0.99)
TOKENS_A_SECOND = "si:tok/s"
BLOCKS_A_SECOND = "si:blk/s"
EACH_ENGINE_S_OWN = "Over the prompts of each engine: one that prefill computes is decode's, too."
IN_THE_INTERVAL = "Counted over the interval of a rate, the first event of a series included."

Shape = Literal["lines", "stacked", "parts of all", "steps", "heatmap", "number"]


@dataclass(frozen=True)
class Limits:
    """From where a value is yellow and red; `red` below `yellow`: small values are the bad ones."""

    yellow: float
    red: float


KV_LIMITS = Limits(0.85, 0.95)  # of a pool's blocks in use


@dataclass(frozen=True)
class Panel:
    """One field of a dashboard."""

    title: str
    queries: tuple[Query, ...]
    unit: str = units.Short
    shape: Shape = "lines"
    limits: Limits | None = None
    note: str = ""  # what the metrics' own meaning does not say
    top: float | None = None  # where the axis ends

    @property
    def description(self) -> str:
        metrics = dict.fromkeys(metric for query in self.queries for metric in query.metrics)
        return "\n\n".join(filter(None, (*(f"`{metric}`: {TABLE[metric].help}" for metric in metrics), self.note)))


@dataclass(frozen=True)
class Row:
    """Lines of panels under a title; the panels of a line are as wide as each other. Rare: closed until asked for."""

    title: str
    lines: Sequence[Sequence[Panel]]
    is_rare: bool = False


@dataclass(frozen=True)
class Board:
    """A dashboard; its file has its name."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]


Named = str | Mapping[str, str]  # a metric, or metrics with their names in the legend


def lines(
    title: str, metrics: Named, unit: str = units.Short, *, choice: Choice = EACH, combine: Combine = "sum",
    shape: Shape = "lines", limits: Limits | None = None, note: str = "", top: float | None = None,
) -> Panel:  # fmt: skip
    """Counters a second, gauges as they stand."""
    queries = tuple(amount(metric, one, combine) for metric, one in _named(metrics, choice))
    return Panel(title, queries, unit, shape, limits, note, top)


def rare(title: str, metrics: Named, *, choice: Choice = EACH, note: str = "") -> Panel:
    """Counters of what seldom happens: how often it did."""
    queries = tuple(events(metric, one) for metric, one in _named(metrics, choice))
    return Panel(title, queries, units.Short, "steps", note=" ".join(filter(None, (note, IN_THE_INTERVAL))))


def part(
    title: str, of: tuple[str, str], *, choice: Choice = EACH, limits: Limits | None = None, top: float | None = 1
) -> Panel:
    """One counter's or gauge's share of another."""
    return Panel(title, (share(*of, choice),), units.PercentUnit, "lines", limits, top=top)


def percentiles(
    title: str, metric: str, unit: str = units.Seconds, *, choice: Choice = EACH, limits: Limits | None = None
) -> Panel:
    return Panel(title, tuple(quantile(one, metric, choice) for one in QUANTILES), unit, limits=limits)


def busy(title: str, metric: str, *, choice: Choice = EACH, note: str = "") -> Panel:
    """The share of the time that a histogram's durations took."""
    return Panel(title, (spent(metric, choice),), units.PercentUnit, note=note)


def heatmap(title: str, metric: str, unit: str = units.Seconds, *, choice: Choice = ALL) -> Panel:
    return Panel(title, (buckets(metric, choice),), unit, "heatmap")


def number(title: str, query: Query, unit: str = units.Short, *, limits: Limits | None = None, note: str = "") -> Panel:
    """A figure over all chosen workers, with its course behind it."""
    return Panel(title, (query,), unit, "number", limits, note)


def ready(title: str, metric: str, *, choice: Choice = ALL) -> Panel:
    """How many of those that say 1 when they are ready do so; green is all of them."""
    return number(title, level(metric, choice, "avg"), units.PercentUnit, limits=Limits(1, 0.5))


def _named(metrics: Named, choice: Choice) -> list[tuple[str, Choice]]:
    named = {metrics: ""} if isinstance(metrics, str) else metrics
    return [(metric, replace(choice, name=name)) for metric, name in named.items()]
