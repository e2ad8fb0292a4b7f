"""PromQL over the metrics of bireme/metrics.py: the table says what a metric is, and with that how it is read.

Every query takes the dashboard's instance and worker, and its model where the metric has that label. None returns NaN
where nothing happens: what would be divided by zero is left out, and Grafana shows "No data".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bireme.metrics import TABLE, Kind

INTERVAL = "$__rate_interval"
OF_ALL, OF_MODEL = 'instance=~"$instance", worker=~"$worker"', 'model=~"$model"'

# A request counts where its client asked, at the frontend or a pipeline, and in each engine that worked for it. Engines
# alone have this gauge.
ENGINES = "on (instance, worker) bireme_engine_up"
SIDES = {"all": "", "clients": f" unless {ENGINES}", "engines": f" and {ENGINES}"}

Side = Literal["all", "clients", "engines"]
Combine = Literal["sum", "max", "avg"]  # of the series that a query does not tell apart


@dataclass(frozen=True)
class Query:
    """An expression, the legend of its series, and the metrics that it reads."""

    expression: str
    legend: str
    metrics: tuple[str, ...]
    is_histogram: bool = False  # its series are buckets


@dataclass(frozen=True)
class Choice:
    """Which series of a metric are read: those that match, told apart by labels."""

    by: Sequence[str]
    where: str = ""  # matchers beside the dashboard's
    side: Side = "all"
    name: str = ""  # put before the labels in the legend

    @property
    def legend(self) -> str:
        return " ".join([self.name, *("{{" + label + "}}" for label in self.by)]).strip()

    def of(self, metric: str) -> str:
        """Return the selector. Raises ValueError for a metric or a label that is not in the table."""
        if metric not in TABLE:
            raise ValueError(f"bireme/metrics.py has no metric {metric}")
        unknown = set(self.by) - {*TABLE[metric].labels, "instance"}
        if unknown:
            raise ValueError(
                f"{metric} has no label {', '.join(sorted(unknown))}, only {', '.join(TABLE[metric].labels)}"
            )
        of_model = OF_MODEL if "model" in TABLE[metric].labels else ""
        return "{" + ", ".join(filter(None, (OF_ALL, of_model, self.where))) + "}"

    def grouped(self, combine: Combine, inner: str, *more: str) -> str:
        labels = ", ".join((*more, *self.by))
        inner += SIDES[self.side]
        return f"{combine} by ({labels}) ({inner})" if labels else f"{combine}({inner})"


def by(*labels: str, where: str = "", side: Side = "all") -> Choice:
    return Choice(labels, where, side)


ALL, EACH, CLIENTS = by(), by("worker"), by(side="clients")


def level(metric: str, choice: Choice = EACH, combine: Combine = "sum") -> Query:
    """A gauge as it stands."""
    selector = _of_kind(metric, choice, "gauge")
    return Query(choice.grouped(combine, f"{metric}{selector}"), choice.legend, (metric,))


def rate(metric: str, choice: Choice = EACH) -> Query:
    """A counter a second."""
    selector = _of_kind(metric, choice, "counter")
    return Query(choice.grouped("sum", f"rate({metric}{selector}[{INTERVAL}])"), choice.legend, (metric,))


def amount(metric: str, choice: Choice = EACH, combine: Combine = "sum") -> Query:
    """A counter a second, a gauge as it stands."""
    choice.of(metric)
    return rate(metric, choice) if TABLE[metric].kind == "counter" else level(metric, choice, combine)


def events(metric: str, choice: Choice = EACH) -> Query:
    """How often a counter of rare events went up in the interval: exact, and with a series' first event.

    Where a label's values are not known beforehand, a series begins with its first event, which increase() never sees.
    """
    selector = _of_kind(metric, choice, "counter")
    now = choice.grouped("sum", f"{metric}{selector}")
    before = choice.grouped("sum", f"{metric}{selector} offset {INTERVAL}")
    return Query(f"clamp_min({now} - ({before} or {now} * 0), 0)", choice.legend, (metric,))


def share(part: str, whole: str, choice: Choice = EACH, where: str = "") -> Query:
    """What part of one counter or gauge another one is; `where` holds for the part alone."""
    narrowed = replace(choice, where=", ".join(filter(None, (choice.where, where))))
    counted, all_of_it = amount(part, narrowed).expression, amount(whole, choice).expression
    return Query(f"{counted} / ({all_of_it} > 0)", choice.legend, (part, whole))


def rest(part: str, whole: str, choice: Choice, where: str) -> Query:
    """What share() leaves: for parts such as failures, whose series begin with the first one."""
    query = share(part, whole, choice, where)
    return Query(f"1 - {query.expression}", query.legend, query.metrics)


def quantile(part: float, metric: str, choice: Choice = EACH) -> Query:
    """A quantile of a histogram; a comparison leaves out the NaN of an interval without observations."""
    name = f"{choice.legend} p{part * 100:g}".strip()
    return Query(f"histogram_quantile({part:g}, {_buckets(metric, choice)}) >= 0", name, (metric,))


def mean(metric: str, choice: Choice = EACH) -> Query:
    """The mean of a histogram's observations."""
    selector = _of_kind(metric, choice, "histogram")
    amounts, counts = (
        choice.grouped("sum", f"rate({metric}_{series}{selector}[{INTERVAL}])") for series in ("sum", "count")
    )
    return Query(f"{amounts} / ({counts} > 0)", choice.legend, (metric,))


def spent(metric: str, choice: Choice = EACH) -> Query:
    """What a histogram's observations add up to, a second; of durations: how much of the time they took."""
    selector = _of_kind(metric, choice, "histogram")
    return Query(choice.grouped("sum", f"rate({metric}_sum{selector}[{INTERVAL}])"), choice.legend, (metric,))


def buckets(metric: str, choice: Choice = ALL) -> Query:
    """A histogram's buckets, for a heatmap."""
    return Query(_buckets(metric, choice), "{{le}}", (metric,), is_histogram=True)


def _buckets(metric: str, choice: Choice) -> str:
    selector = _of_kind(metric, choice, "histogram")
    return choice.grouped("sum", f"rate({metric}_bucket{selector}[{INTERVAL}])", "le")


def _of_kind(metric: str, choice: Choice, kind: Kind) -> str:
    """Return the selector. Raises ValueError for a metric of another kind, which has to be read otherwise."""
    selector = choice.of(metric)
    if TABLE[metric].kind != kind:
        raise ValueError(f"{metric} is a {TABLE[metric].kind}, read here as a {kind}")
    return selector
