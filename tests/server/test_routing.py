"""Requests go where their KV lies: one tritonserver, two prefill and three decode workers."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.triton_client import Client
from tests.server.watch import total, until

pytestmark = pytest.mark.server

HERD = 30
NEW = itertools.count(1000)  # prompts that nobody has asked yet


@pytest.fixture(scope="module")
def client(sample_model, write_recipe, start):
    config = {
        "max_batch_size": 64,
        "kv_cache_config": {"max_tokens": 1 << 18},
        "cache_transceiver_config": {"backend": "DEFAULT"},
        "mocker": {"step_ms": 2, "prefill_ms": 20},
    }
    engine = {"engine": "mocker", "engine_config": config}
    workers = {"prefill": engine | {"replicas": 2}, "decode": engine | {"replicas": 3}}
    server = start(write_recipe(sample_model("llama"), workers, router={"has_model": True, "mode": "kv"}))
    answers = Client(server.grpc)
    answers.server = server
    until(lambda: total(server, "bireme_kv_feed_resyncs_total", worker="generate") >= 5, 20, "generate follows all")
    return answers


def prompt(number, length=1000):
    return [(7 * at + 13 * number) % 400 + 5 for at in range(length)]


def usage(answer):
    return json.loads(answer["usage"])


def test_a_prompt_that_comes_again_is_found_where_it_was_computed_as_predicted(client):
    first = usage(client.generate(input_ids=prompt(1), max_tokens=4, stream=True))
    assert (first["cached_tokens"], first["predicted_cached_tokens"]) == (0, 0)
    for _ in range(5):
        again = usage(client.generate(input_ids=[*prompt(1), 9, 9], max_tokens=4, stream=True))
        assert again["cached_tokens"] == again["predicted_cached_tokens"] == 992
        assert again["prefill_worker"] in (first["prefill_worker"], first["decode_worker"])


def test_a_burst_of_one_new_prefix_computes_it_once_or_twice(client):
    first = prompt(next(NEW))

    def ask(number):
        return usage(client.generate(input_ids=[*first, number, 5], max_tokens=2, stream=True))

    with ThreadPoolExecutor(HERD) as pool:
        usages = list(pool.map(ask, range(HERD)))
    assert 1 <= sum(one["predicted_cached_tokens"] == 0 for one in usages) <= 2
    assert len({one["prefill_worker"] for one in usages if not one["cached_tokens"]}) <= 2  # several in its first step


def test_a_short_prompt_is_not_transferred_and_a_long_one_is(client):
    short = usage(client.generate(input_ids=prompt(3, 20), max_tokens=2, stream=True))
    long = usage(client.generate(input_ids=prompt(4), max_tokens=2, stream=True))
    assert short["prefill_worker"] == short["decode_worker"] and short["transfer_ms"] == 0
    assert long["prefill_worker"] in ("prefill", "prefill_1")


def test_salted_prompts_are_found_again_and_by_nobody_else(client):
    salted = {"input_ids": prompt(5), "max_tokens": 2, "stream": True, "cache_salt": "ours"}
    client.generate(**salted)
    again = usage(client.generate(**salted))
    other = usage(client.generate(**salted | {"cache_salt": "theirs"}))
    assert again["cached_tokens"] == again["predicted_cached_tokens"] == 992
    assert other["cached_tokens"] == other["predicted_cached_tokens"] == 0


def test_the_model_router_knows_what_the_workers_hold(client):
    placed = usage(client.generate(input_ids=prompt(6), max_tokens=2, stream=True))
    until(lambda: max(client.infer("router", input_ids=prompt(6))["overlaps"]) == 992, 10, "its index has the events")
    answer = client.infer("router", input_ids=prompt(6))
    holders = {worker for worker, overlap in zip(answer["workers"], answer["overlaps"], strict=True) if overlap}
    assert {placed["prefill_worker"], placed["decode_worker"]} >= holders != set()
    assert len(answer["workers"]) == len(answer["costs"]) == 5
