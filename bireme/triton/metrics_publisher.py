"""Copies a Registry to Triton's /metrics, on one thread and nowhere else.

Two threads on one pb_utils.Metric crash the whole server (measured up to 26.07), and a call costs 20-45 us: so this
thread publishes what changed in the Registry, every 250 ms. Histograms become the three series of Prometheus, as
counters: a call a bucket and tick instead of one an observation.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from bireme.metric_aliases import Aliases
from bireme.metrics import TABLE, Labels, MetricDelta, MetricSpec, Registry

PERIOD_S = 0.25
logger = logging.getLogger("bireme.triton")


class MetricsPublisher:
    """The thread; `collect` is called before each turn, for sums that are kept elsewhere."""

    def __init__(
        self, registry: Registry, collect: Callable[[], None] = lambda: None, aliases: Aliases | None = None
    ) -> None:
        self._registry = registry
        self._collect = collect
        self._aliases = aliases
        self._series = _Series(TABLE | aliases.specs if aliases is not None else TABLE)
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-publisher", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float) -> None:
        self._stops.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        while True:
            is_last = self._stops.wait(PERIOD_S)
            try:
                self._collect()
                delta = self._registry.take_delta()
                self._series.publish(delta)
                if self._aliases is not None:
                    self._series.publish(self._aliases.translate(delta))
            except Exception:
                logger.exception("publish_failed")
            if is_last:
                return


class _Series:
    """Triton's families and metrics, made on first use; touched by the publisher's thread only."""

    def __init__(self, specs: Mapping[str, MetricSpec]) -> None:
        self._specs = specs
        self._families: dict[str, Any] = {}  # without a reference Triton refuses their metrics
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}  # last value set

    def publish(self, delta: MetricDelta) -> None:
        for name, labels, amount in delta.counters:
            self._increment(name, self._specs[name], labels, amount)
        for name, labels, value in delta.gauges:
            if self._gauges.get((name, labels)) != value:
                self._metric(name, self._specs[name], labels).set(value)
                self._gauges[name, labels] = value
        for name, labels, counts, total in delta.histograms:
            self._publish_histogram(self._specs[name], labels, counts, total)

    def _publish_histogram(self, spec: MetricSpec, labels: Labels, counts: Sequence[int], total: float) -> None:
        bounds = [_bound(bound) for bound in spec.buckets] + ["+Inf"]
        for bound, count in zip(bounds, itertools.accumulate(counts), strict=True):
            self._increment(f"{spec.name}_bucket", spec, labels, count, bound)
        self._increment(f"{spec.name}_sum", spec, labels, total)
        self._increment(f"{spec.name}_count", spec, labels, sum(counts))

    def _increment(self, name: str, spec: MetricSpec, labels: Labels, amount: float, bound: str = "") -> None:
        metric = self._metric(name, spec, labels, bound)  # made even for 0: a histogram needs all its buckets
        if amount:
            metric.increment(amount)

    def _metric(self, name: str, spec: MetricSpec, labels: Labels, bound: str = "") -> Any:
        key = (name, (*labels, bound) if bound else labels)
        if key not in self._metrics:
            values = dict(zip(spec.labels, labels, strict=True)) | ({"le": bound} if bound else {})
            self._metrics[key] = self._family(name, spec).Metric(labels=values)
        return self._metrics[key]

    def _family(self, name: str, spec: MetricSpec) -> Any:
        if name not in self._families:
            kind = pb_utils.MetricFamily.GAUGE if spec.kind == "gauge" else pb_utils.MetricFamily.COUNTER
            self._families[name] = pb_utils.MetricFamily(name=name, description=spec.help, kind=kind)
        return self._families[name]


def _bound(bound: float) -> str:
    return str(float(bound))
