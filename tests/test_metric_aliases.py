"""What bireme counts, under the names of others."""

import re

import pytest

from bireme.config import MetricsConfig, Recipe, WorkerEntry
from bireme.metric_aliases import OF_FRONTENDS, OF_WORKERS, aliases_of_frontend, aliases_of_worker
from bireme.metrics import TABLE, Registry

EVERY = [one for own in (*OF_WORKERS.values(), *OF_FRONTENDS.values()) for one in own]


def recipe(*names):
    workers = {"decode": WorkerEntry(engine="mocker")}
    return Recipe(model="m", workers=workers, name="galley", metrics=MetricsConfig(aliases=names))


def shown(aliases, registry):
    """Return name and labels -> value, of all kinds."""
    delta = aliases.translate(registry.take_delta())
    rows = [*delta.counters, *delta.gauges, *((name, labels, counts) for name, labels, counts, _ in delta.histograms)]
    return {
        (name, *sorted(zip(aliases.specs[name].labels, labels, strict=True))): value for name, labels, value in rows
    }


def worker_with(**levels):
    registry = Registry("decode")
    for name, value in levels.items():
        registry.set(f"bireme_{name}", value)
    return registry


@pytest.mark.parametrize("alias", EVERY, ids=lambda one: one.name)
def test_a_name_is_prometheus_and_is_made_of_metrics_that_there_are(alias):
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", alias.name)
    kinds = {TABLE[name].kind for name in alias.sources}
    assert len(kinds) == 1 and (len(alias.sources) == 1 or kinds == {"gauge"})
    assert (alias.name.endswith("_total") or alias.kind != "counter") and not (alias.renamed and alias.only)


def test_without_aliases_nothing_is_translated():
    assert aliases_of_worker(recipe(), "decode") is None and aliases_of_frontend(recipe(), "frontend") is None
    assert aliases_of_worker(recipe("vllm"), "generate") is None  # no worker
    assert aliases_of_frontend(recipe("vllm", "triton_trtllm"), "frontend") is None  # workers' alone


def test_blocks_are_told_as_tritons_tensorrt_llm_backend_tells_them():
    registry = worker_with(kv_blocks_used=30, kv_blocks_total=120, kv_block_tokens=32)
    found = shown(aliases_of_worker(recipe("triton_trtllm"), "decode"), registry)
    name, place = "nv_trt_llm_kv_cache_block_metrics", (("model", "decode"), ("version", "1"))
    kinds = {"used": 30, "max": 120, "free": 90, "fraction": 0.25, "tokens_per": 32}
    assert found == {(name, ("kv_cache_block_type", kind), *place): value for kind, value in kinds.items()}


def test_a_level_that_lacks_a_source_is_left_out():
    found = shown(aliases_of_worker(recipe("vllm"), "decode"), worker_with(kv_blocks_used=3, requests_waiting=2))
    assert found == {("vllm:num_requests_waiting", ("engine", "decode"), ("model_name", "galley")): 2}


def test_a_pool_without_blocks_is_not_used():
    found = shown(aliases_of_worker(recipe("vllm"), "decode"), worker_with(kv_blocks_used=0, kv_blocks_total=0))
    assert found[("vllm:kv_cache_usage_perc", ("engine", "decode"), ("model_name", "galley"))] == 0


def test_a_pool_of_another_size_takes_the_place_of_the_former():
    """Triton's page keeps every series: the former says 0."""
    aliases, registry = aliases_of_worker(recipe("vllm"), "decode"), worker_with(kv_block_tokens=32, kv_blocks_total=8)
    shown(aliases, registry)
    registry.set("bireme_kv_blocks_total", 9)
    found = {dict(key[1:])["num_gpu_blocks"]: value for key, value in shown(aliases, registry).items()}
    assert found == {"8": 0, "9": 1}


def test_outcomes_are_called_as_others_call_them():
    registry = Registry("decode")
    for outcome in ("stop", "length", "length", "cancelled", "UNAVAILABLE", "not_finished"):
        registry.count_end(outcome)
    aliases = aliases_of_worker(recipe("vllm", "dynamo"), "decode")
    delta = aliases.translate(registry.take_delta())
    sums = {}
    for name, labels, amount in delta.counters:
        label = dict(zip(aliases.specs[name].labels, labels, strict=True))
        kind = (name, label.get("finished_reason") or label.get("error_type"))
        sums[kind] = sums.get(kind, 0) + amount
    assert sums == {
        **{("vllm:request_success_total", reason): 1 for reason in ("stop", "abort", "error")},
        ("vllm:request_success_total", "length"): 3,
        ("dynamo_component_requests_total", None): 6,
        ("dynamo_component_errors_total", "generate"): 1,
    }


def test_a_histogram_keeps_its_counts_and_its_buckets():
    registry = Registry("decode")
    registry.observe("bireme_time_to_first_token_seconds", 0.2, times=3)
    aliases = aliases_of_worker(recipe("vllm"), "decode")
    ((name, _, counts, total),) = aliases.translate(registry.take_delta()).histograms
    assert (name, sum(counts), total) == ("vllm:time_to_first_token_seconds", 3, pytest.approx(0.6))
    assert aliases.specs[name].buckets == TABLE["bireme_time_to_first_token_seconds"].buckets


def test_metrics_of_another_worker_are_not_taken_for_its_own():
    registry = Registry("decode.embeddings")
    registry.set("bireme_requests_waiting", 5)
    registry.add("bireme_generated_tokens_total", 5)
    assert shown(aliases_of_worker(recipe("vllm", "dynamo"), "decode"), registry) == {}


def test_a_frontends_counter_is_the_sum_of_a_histogram():
    registry = Registry("frontend")
    registry.observe("bireme_answered_generated_tokens", 7, times=2)
    found = shown(aliases_of_frontend(recipe("dynamo"), "frontend"), registry)
    assert found[("dynamo_frontend_output_tokens_total", ("model", "galley"))] == 14
