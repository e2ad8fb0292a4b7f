"""The frontend's metrics as a Prometheus page: the names of metrics.TABLE and, where asked for, those of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bireme.metric_aliases import Aliases
from bireme.metrics import TABLE, Labels, MetricDelta, MetricSpec, Registry

Histogram = tuple[list[int], float]  # counts a bucket, the sum
Key = tuple[str, Labels]
_T = TypeVar("_T")
KEY_LABEL = "key"  # an API key's name
CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
_AT_ONCE_S, _SHARE = 0.001, 20


class MetricsPage:
    def __init__(self, registry: Registry, more: Mapping[Registry, Aliases] | None = None) -> None:
        """`more`: registries whose metrics have other names, too."""
        self._sources: dict[Registry, Aliases | None] = {registry: None} | dict(more or {})
        self._specs = dict(TABLE)
        for aliases in (more or {}).values():
            self._specs |= aliases.specs
        self._own = _Sums(self._specs)

    def text(
        self, others: Iterable[MetricDelta] = (), only_key: str | None = None, levels: Iterable[MetricDelta] = ()
    ) -> bytes:
        """Return the page; `others` are the totals of processes that serve the same port. `only_key`: no other API key
        is named. `levels`: what is the same in all processes.
        """
        sums = _Sums(self._specs)
        for totals in (self.totals(), *others):
            shown = totals if only_key is None else _without_other_keys(totals, only_key)
            sums.add(shown, has_levels_of_its_own=True)
        for level in levels:
            sums.add(level)
        page = CollectorRegistry(auto_describe=False)
        page.register(sums)
        return generate_latest(page)

    def totals(self) -> MetricDelta:
        for source, aliases in self._sources.items():
            delta = source.take_delta()
            self._own.add(delta)
            if aliases is not None:
                self._own.add(aliases.translate(delta))
        return self._own.totals()


class KeptPages:
    """Pages by whom they are for, each given again for a time in proportion to its making: however often somebody
    asks, pages take a twentieth of the loop's time. One that is made at once is made anew each time.
    """

    def __init__(self) -> None:
        self._pages: dict[str | None, tuple[bytes, float]] = {}  # key's name -> page, until when it is given
        self._lock = asyncio.Lock()

    async def get(self, only_key: str | None, make: Callable[[], Awaitable[Callable[[], bytes]]]) -> bytes:
        """`make` gathers what the page shows, and returns what writes it."""
        async with self._lock:  # those who ask meanwhile get this page
            page, until = self._pages.get(only_key, (b"", 0.0))
            if time.monotonic() < until:
                return page
            write = await make()
            began = time.thread_time()
            page = write()
            took_s = time.thread_time() - began
            now = time.monotonic()
            self._pages = {name: one for name, one in self._pages.items() if now < one[1]}
            if took_s > _AT_ONCE_S:
                self._pages[only_key] = (page, now + _SHARE * took_s)
            return page


def _without_other_keys(totals: MetricDelta, only: str) -> MetricDelta:
    def is_shown(name: str, labels: Sequence[str]) -> bool:
        spec = TABLE.get(name)  # other names have no keys
        return spec is None or dict(zip(spec.labels, labels, strict=True)).get(KEY_LABEL, only) == only

    return MetricDelta(
        [row for row in totals.counters if is_shown(row[0], row[1])],
        [row for row in totals.gauges if is_shown(row[0], row[1])],
        [row for row in totals.histograms if is_shown(row[0], row[1])],
    )


class _Sums(Collector):
    def __init__(self, specs: Mapping[str, MetricSpec]) -> None:
        self._specs = specs
        self._counters: dict[Key, float] = {}
        self._gauges: dict[Key, float] = {}
        self._histograms: dict[Key, Histogram] = {}

    def add(self, delta: MetricDelta, has_levels_of_its_own: bool = False) -> None:
        """Add increments; levels replace the former ones, or (another process's) add to them."""
        for name, labels, value in delta.counters:
            key = (name, tuple(labels))
            self._counters[key] = self._counters.get(key, 0.0) + value
        for name, labels, value in delta.gauges:
            key = (name, tuple(labels))
            self._gauges[key] = value + (self._gauges.get(key, 0.0) if has_levels_of_its_own else 0.0)
        for name, labels, counts, total in delta.histograms:
            key = (name, tuple(labels))
            before, sum_before = self._histograms.get(key, ([0] * len(counts), 0.0))
            self._histograms[key] = ([a + b for a, b in zip(before, counts, strict=True)], sum_before + total)

    def totals(self) -> MetricDelta:
        return MetricDelta(
            [(*key, value) for key, value in self._counters.items()],
            [(*key, value) for key, value in self._gauges.items()],
            [(*key, *histogram) for key, histogram in self._histograms.items()],
        )

    def collect(self) -> Iterator[Metric]:
        for kind, levels in ((CounterMetricFamily, self._counters), (GaugeMetricFamily, self._gauges)):
            for name, values in _by_name(levels).items():
                family = kind(name, self._specs[name].help, labels=self._specs[name].labels)
                for labels, value in values.items():
                    family.add_metric(labels, value)
                yield family
        for name, histograms in _by_name(self._histograms).items():
            yield _histogram(self._specs[name], histograms)


def _by_name(values: Mapping[Key, _T]) -> dict[str, dict[Labels, _T]]:
    found: dict[str, dict[Labels, _T]] = {}
    for (name, labels), value in values.items():
        found.setdefault(name, {})[labels] = value
    return found


def _histogram(spec: MetricSpec, histograms: dict[Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
    bounds = [*(str(float(bound)) for bound in spec.buckets), "+Inf"]
    for labels, (counts, total) in histograms.items():
        sums = [sum(counts[: at + 1]) for at in range(len(counts))]
        family.add_metric(labels, list(zip(bounds, sums, strict=True)), sum_value=total)
    return family
