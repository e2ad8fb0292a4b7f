"""The frontend's metrics as a Prometheus page: the names of metrics.TABLE, from one registry."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bireme.metrics import TABLE, Labels, MetricSpec, Registry

Histogram = tuple[list[int], float]  # counts a bucket, the sum
CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


class MetricsPage(Collector):
    """Adds up what the registry counts."""

    def __init__(self, registry: Registry) -> None:
        self._source = registry
        self._counters: dict[str, dict[Labels, float]] = {}
        self._gauges: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        self._page = CollectorRegistry(auto_describe=False)
        self._page.register(self)

    def text(self) -> bytes:
        return generate_latest(self._page)

    def collect(self) -> Iterator[Metric]:
        self._take()
        for name, values in self._counters.items():
            family = CounterMetricFamily(name, TABLE[name].help, labels=TABLE[name].labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
        for name, values in self._gauges.items():
            gauge = GaugeMetricFamily(name, TABLE[name].help, labels=TABLE[name].labels)
            for labels, value in values.items():
                gauge.add_metric(labels, value)
            yield gauge
        for name, histograms in self._histograms.items():
            yield _histogram(TABLE[name], histograms)

    def _take(self) -> None:
        delta = self._source.take_delta()
        for name, labels, value in delta.counters:
            values = self._counters.setdefault(name, {})
            values[labels] = values.get(labels, 0.0) + value
        for name, labels, value in delta.gauges:
            self._gauges.setdefault(name, {})[labels] = value
        for name, labels, counts, total in delta.histograms:
            own = self._histograms.setdefault(name, {})
            before, sum_before = own.get(labels, ([0] * len(counts), 0.0))
            own[labels] = ([a + b for a, b in zip(before, counts, strict=True)], sum_before + total)


def _histogram(spec: MetricSpec, histograms: dict[Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
    bounds = [*(str(float(bound)) for bound in spec.buckets), "+Inf"]
    for labels, (counts, total) in histograms.items():
        sums = [sum(counts[: at + 1]) for at in range(len(counts))]
        family.add_metric(labels, list(zip(bounds, sums, strict=True)), sum_value=total)
    return family
