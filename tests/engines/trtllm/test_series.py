"""Prometheus series of TensorRT-LLM on their way to Triton's /metrics."""

from __future__ import annotations

from types import SimpleNamespace

import prometheus_client
import pytest

from bireme.engines.trtllm import series
from bireme.engines.trtllm.iterations import Iterations
from bireme.engines.trtllm.series import SeriesRelay
from bireme.metrics import TABLE, Registry
from tests.engines.engine_fixtures import wait_for


@pytest.fixture
def registry(monkeypatch):
    """A registry of its own in place of prometheus_client's default, and a collector that does nothing."""
    own = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", own)
    monkeypatch.setattr(series, "_make_collector", lambda labels: object())
    return own


@pytest.fixture
def metrics():
    return Registry("decode")


def test_counters_are_carried_as_increments(registry, metrics):
    counter = prometheus_client.Counter("trtllm_request_success", "", ["finished_reason"], registry=registry)
    relay = SeriesRelay(metrics, "decode", "m")
    counter.labels("stop").inc(3)
    relay.relay()
    assert metrics.take_delta().counters == [("trtllm_request_success_total", ("decode", "stop"), 3.0)]
    relay.relay()
    assert metrics.take_delta().counters == []
    counter.labels("stop").inc()
    relay.relay()
    assert metrics.take_delta().counters == [("trtllm_request_success_total", ("decode", "stop"), 1.0)]


def test_gauges_are_carried_as_they_are(registry, metrics):
    prometheus_client.Gauge("trtllm_kv_cache_hit_rate", "", ["model_name"], registry=registry).labels("m").set(0.25)
    SeriesRelay(metrics, "decode", "m").relay()
    assert metrics.take_delta().gauges == [("trtllm_kv_cache_hit_rate", ("decode",), 0.25)]


def test_histograms_of_other_bounds_find_their_buckets(registry, metrics):
    name = "trtllm_e2e_request_latency_seconds"
    histogram = prometheus_client.Histogram(name, "", buckets=(0.2, 1.9, 1e6), registry=registry)
    relay = SeriesRelay(metrics, "decode", "m")
    for value in (0.1, 1.5, 1.5, 99999):
        histogram.observe(value)
    relay.relay()
    ((found, labels, counts, total),) = metrics.take_delta().histograms
    bounds = TABLE[name].buckets
    assert (found, labels, sum(counts), total) == (name, ("decode",), 4, pytest.approx(100002.1))
    assert (counts[0], counts[bounds.index(2.0)], counts[-1]) == (1, 2, 1)


def test_series_that_nobody_knows_are_left_out_and_named_once(registry, metrics, caplog):
    caplog.set_level("INFO")
    prometheus_client.Gauge("trtllm_brand_new", "", registry=registry).set(1)
    relay = SeriesRelay(metrics, "decode", "m")
    relay.relay()
    relay.relay()
    assert metrics.take_delta().gauges == []
    assert caplog.text.count("series_left_out name=trtllm_brand_new") == 1


def test_a_collector_that_raises_does_not_end_a_request(monkeypatch, metrics):
    class Collector:
        def log_metrics_dict(self, given):
            raise KeyError("e2e")

    monkeypatch.setattr(series, "_make_collector", lambda labels: Collector())
    relay = SeriesRelay(metrics, "decode", "m")
    relay.request_ended({"ttft": 1})
    relay.request_ended({"ttft": 1})


def test_without_a_collector_nothing_is_relayed(metrics, monkeypatch):
    monkeypatch.setattr(series, "_make_collector", lambda labels: None)
    relay = SeriesRelay(metrics, "decode", "m")
    relay.iteration({"iter": 1})
    relay.relay()
    assert metrics.take_delta().gauges == []


def test_series_that_cannot_be_relayed_end_no_reading(caplog):
    relayed = []

    def relay():
        relayed.append(len(relayed))
        raise KeyError("another release's")

    iterations = Iterations(object(), Registry("decode"), SimpleNamespace(relay=relay), 32, 0, has_stats=False)
    iterations.start()
    wait_for(lambda: len(relayed) > 1, 30)
    iterations.stop()
    assert [record.msg for record in caplog.records].count("series_not_relayed") == 1
