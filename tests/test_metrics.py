from __future__ import annotations

import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.metrics import TABLE, Registry, decode_delta, encode_delta, use_buckets

COUNTER, GAUGE, HISTOGRAM = "bireme_generated_tokens_total", "bireme_requests_running", "bireme_queue_seconds"
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 100)),
        st.tuples(st.just("set"), st.integers(0, 100)),
        st.tuples(st.just("observe"), st.integers(0, 100)),
        st.tuples(st.just("publish"), st.just(0)),
    ),
    max_size=60,
)


def change(registry, act, value):
    if act == "add":
        registry.add(COUNTER, value)
    elif act == "set":
        registry.set(GAUGE, value)
    elif act == "observe":
        registry.observe(HISTOGRAM, value)


@given(CHANGES)
def test_merged_deltas_equal_direct_changes(changes):
    direct, engine, stub = Registry("decode"), Registry("decode"), Registry("decode")
    for act, value in changes:
        change(direct, act, value)
        change(engine, act, value)
        if act == "publish":
            stub.merge(decode_delta(encode_delta(engine.take_delta())))
    stub.merge(decode_delta(encode_delta(engine.take_delta())))
    assert stub.take_delta() == direct.take_delta()


def test_taking_a_delta_forgets_increments_and_keeps_gauges():
    registry = Registry("decode")
    for act in ("add", "set", "observe"):
        change(registry, act, 2)
    registry.take_delta()
    delta = registry.take_delta()
    assert (delta.counters, delta.histograms) == ([], [])
    assert delta.gauges == [(GAUGE, ("decode",), 2)]


def test_a_flag_travels_as_a_number():
    engine, stub = Registry("decode"), Registry("decode")
    engine.set(GAUGE, True)
    stub.merge(decode_delta(encode_delta(engine.take_delta())))
    assert stub.take_delta().gauges == [(GAUGE, ("decode",), 1.0)]


def test_an_observation_falls_into_the_first_bucket_that_holds_it():
    registry = Registry("decode")
    for value in (0.001, 0.0011, 1000.0):
        registry.observe(HISTOGRAM, value)
    registry.observe(HISTOGRAM, 60.0, times=3)
    ((_, _, counts, total),) = registry.take_delta().histograms
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (1, 1, 3, 1)
    assert total == pytest.approx(1180.0021)


def test_a_counter_that_has_been_started_is_there_before_its_first_event_and_counts_on():
    registry = Registry("decode")
    registry.start(COUNTER)
    registry.start("bireme_engine_restarts_total", labels=("exit",))
    assert registry.take_delta().counters == [
        (COUNTER, ("decode",), 0),
        ("bireme_engine_restarts_total", ("decode", "exit"), 0),
    ]
    registry.add(COUNTER, 3)
    registry.start(COUNTER)
    assert registry.take_delta().counters == [(COUNTER, ("decode",), 3)]


def test_observations_fall_into_the_buckets_that_are_asked_for(monkeypatch):
    monkeypatch.setitem(TABLE, HISTOGRAM, TABLE[HISTOGRAM])  # as it was, afterwards
    use_buckets({HISTOGRAM: (1.0, 2.0)})
    registry = Registry("decode")
    for value in (0.5, 1.5, 7.0, 8.0):
        registry.observe(HISTOGRAM, value)
    assert registry.take_delta().histograms == [(HISTOGRAM, ("decode",), [1, 1, 2], 17.0)]


def test_the_worker_is_put_first_unless_given():
    registry = Registry("decode")
    registry.add("bireme_engine_restarts_total", 1, "exit")
    registry.add("bireme_engine_restarts_total", 1, "prefill", "exit")
    labels = [labels for _, labels, _ in registry.take_delta().counters]
    assert labels == [("decode", "exit"), ("prefill", "exit")]


@pytest.mark.parametrize("labels", [(), ("decode", "exit", "more")])
def test_a_wrong_number_of_labels_is_noticed(labels):
    with pytest.raises(AssertionError, match="has labels"):
        Registry("decode").add("bireme_engine_restarts_total", 1, *labels)


def test_an_unknown_metric_is_noticed():
    with pytest.raises(KeyError):
        Registry("decode").add("bireme_nope_total")


def test_threads_lose_nothing():
    registry, merged = Registry("decode"), Registry("decode")
    stop = threading.Event()

    def publish():
        while not stop.is_set():
            merged.merge(registry.take_delta())

    def hammer():
        for _ in range(5000):
            registry.add(COUNTER)
            registry.observe(HISTOGRAM, 0.5)

    publisher = threading.Thread(target=publish)
    hammers = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in (publisher, *hammers):
        thread.start()
    for thread in hammers:
        thread.join()
    stop.set()
    publisher.join()
    merged.merge(registry.take_delta())
    delta = merged.take_delta()
    assert delta.counters == [(COUNTER, ("decode",), 20000)]
    assert sum(delta.histograms[0][2]) == 20000


@pytest.mark.parametrize("spec", TABLE.values(), ids=lambda spec: spec.name)
def test_the_table_follows_prometheus_conventions(spec):
    assert re.fullmatch(r"bireme_[a-z_]+|trtllm_[a-z0-9_]+", spec.name)
    if spec.name.startswith("bireme_"):  # TensorRT-LLM's own series keep their names
        assert spec.name.endswith("_total") == (spec.kind == "counter" or spec.name == "bireme_kv_blocks_total")
    assert spec.help.endswith(".") and spec.labels[:1] == ("worker",)
    assert bool(spec.buckets) == (spec.kind == "histogram") and list(spec.buckets) == sorted(set(spec.buckets))
