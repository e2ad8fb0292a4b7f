"""MetricsCollector: series on prometheus_client's default registry; those of iterations came with 1.3."""

from __future__ import annotations

from typing import Any

import prometheus_client

from tensorrt_llm import _contract

_TABLE = _contract.contract()["prometheus_metrics"]
_BUCKETS = _TABLE["buckets"]
_TIMES = {  # key of metrics_dict: series, buckets
    "e2e": ("trtllm_e2e_request_latency_seconds", _BUCKETS["e2e_queue_decode_inference"]),
    "ttft": ("trtllm_time_to_first_token_seconds", _BUCKETS["ttft"]),
    "tpot": ("trtllm_time_per_output_token_seconds", _BUCKETS["tpot"]),
    "request_queue_time": ("trtllm_request_queue_time_seconds", _BUCKETS["e2e_queue_decode_inference"]),
}


class MetricsCollector:
    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        names, reason = list(labels), _TABLE["label_finish"]
        _forget_earlier()
        self._success = prometheus_client.Counter("trtllm_request_success", "Requests", [*names, reason])
        self._times = {
            key: prometheus_client.Histogram(name, name, names, buckets=buckets)
            for key, (name, buckets) in _TIMES.items()
        }
        self._gauges = {
            name: prometheus_client.Gauge(name, name, names)
            for name in (("trtllm_kv_cache_hit_rate", "trtllm_kv_cache_utilization") if _contract.FROM_1_3 else ())
        }

    def _log_request(self, metrics_dict: dict[str, Any]) -> None:
        reason = metrics_dict.get("finished_reason")
        if reason is None:
            return
        self._success.labels(**self._labels, **{_TABLE["label_finish"]: str(reason)}).inc()
        for key, histogram in self._times.items():
            if key in metrics_dict:
                histogram.labels(**self._labels).observe(metrics_dict[key])

    def _log_iteration(self, stats: dict[str, Any]) -> None:
        blocks = stats.get("kvCacheStats") or {}
        if "cacheHitRate" in blocks:
            self._gauges["trtllm_kv_cache_hit_rate"].labels(**self._labels).set(blocks["cacheHitRate"])
        if blocks.get("maxNumBlocks"):
            share = blocks["usedNumBlocks"] / blocks["maxNumBlocks"]
            self._gauges["trtllm_kv_cache_utilization"].labels(**self._labels).set(share)


setattr(
    MetricsCollector,
    "log_request_metrics_dict" if _contract.FROM_1_3 else "log_metrics_dict",
    MetricsCollector._log_request,
)
if _contract.FROM_1_3:
    MetricsCollector.log_iteration_stats = MetricsCollector._log_iteration  # type: ignore[attr-defined]


def _forget_earlier() -> None:
    """A process that makes a second engine, as tests do, would register the same series twice."""
    registry = prometheus_client.REGISTRY
    for collector in list(registry._collector_to_names):
        if any(name.startswith("trtllm_") for name in registry._collector_to_names[collector]):
            registry.unregister(collector)
