"""TensorRT-LLM's own Prometheus series, carried over to Triton's /metrics.

Its MetricsCollector fills prometheus_client's default registry in this process; `relay` reads that and gives
what changed to bireme's registry. Only series that metrics.TABLE names are carried: others are logged once.
"""

from __future__ import annotations

import bisect
import importlib
import logging
import threading
from collections.abc import Mapping
from typing import Any

from bireme.metrics import TABLE, Labels, MetricDelta, MetricSpec, Registry

logger = logging.getLogger("bireme.engines.trtllm")
PREFIX = "trtllm_"


class SeriesRelay:
    """`request_ended` and `iteration` from any thread; `relay` from one."""

    def __init__(self, metrics: Registry, worker: str, model_name: str) -> None:
        self._metrics = metrics
        self._worker = worker
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, Labels], Any] = {}
        self._unknown: set[str] = set()
        self._collector = _make_collector({"model_name": model_name, "engine_type": "trtllm"})
        names = ("log_request_metrics_dict", "log_metrics_dict")  # 1.3's and 1.2's
        found = (getattr(self._collector, name, None) for name in names)
        self._log_request = next(filter(None, found), None)
        self._log_iteration = getattr(self._collector, "log_iteration_stats", None)

    def request_ended(self, metrics_dict: Mapping[str, Any]) -> None:
        """Take a result's `metrics_dict`, which is filled when return_perf_metrics is set."""
        self._call(self._log_request, metrics_dict)

    def iteration(self, stats: Mapping[str, Any]) -> None:
        self._call(self._log_iteration, stats)

    def relay(self) -> None:
        if self._collector is None:
            return
        import prometheus_client

        delta = MetricDelta([], [], [])
        for family in prometheus_client.REGISTRY.collect():
            if family.name.startswith(PREFIX):
                self._carry(family, delta)
        self._metrics.merge(delta)

    def _call(self, method: Any, argument: Any) -> None:
        if method is None or not argument:
            return
        try:
            with self._lock:
                method(argument)
        except Exception:  # a collector's defect must not end a request
            logger.exception("metrics_collector_failed")
            self._log_request = self._log_iteration = None

    def _carry(self, family: Any, delta: MetricDelta) -> None:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        spec = TABLE.get(name)
        if spec is None or spec.kind != family.type:
            if name not in self._unknown:
                self._unknown.add(name)
                logger.info("series_left_out name=%s type=%s", name, family.type)
            return
        if spec.kind == "histogram":
            self._carry_histogram(family, spec, delta)
            return
        for sample in family.samples:
            if sample.name != name:
                continue
            labels = self._labels(spec, sample.labels)
            if spec.kind == "gauge":
                delta.gauges.append((name, labels, sample.value))
            elif (amount := sample.value - self._seen.get((name, labels), 0.0)) > 0:
                self._seen[name, labels] = sample.value
                delta.counters.append((name, labels, amount))

    def _carry_histogram(self, family: Any, spec: MetricSpec, delta: MetricDelta) -> None:
        labels = self._labels(spec, {})
        counts, total, below = [0] * (len(spec.buckets) + 1), 0.0, 0.0
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                # Another release's bounds may differ: a bucket counts where its upper bound lies.
                counts[bisect.bisect_left(spec.buckets, float(sample.labels["le"]))] += int(sample.value - below)
                below = sample.value
            elif sample.name.endswith("_sum"):
                total = sample.value
        known, known_total = self._seen.get((family.name, labels), ([0] * len(counts), 0.0))
        if counts != known:
            new = [now - before for now, before in zip(counts, known, strict=True)]
            delta.histograms.append((spec.name, labels, new, total - known_total))
            self._seen[family.name, labels] = (counts, total)

    def _labels(self, spec: MetricSpec, given: Mapping[str, str]) -> Labels:
        return tuple(self._worker if name == "worker" else given.get(name, "") for name in spec.labels)


def _make_collector(labels: dict[str, str]) -> Any:
    """None where TensorRT-LLM has none or it can't be made."""
    try:
        return importlib.import_module("tensorrt_llm.metrics").MetricsCollector(labels)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        logger.info("metrics_collector_missing reason=%s", error)
        return None
