"""A prefix that was evicted comes back from host memory, and routers know that it lies there: one tritonserver."""

from __future__ import annotations

import json

import pytest

from tests.server.triton_client import Client
from tests.server.watch import total, until

pytestmark = pytest.mark.server

SIZE = 16


@pytest.fixture(scope="module")
def server(sample_model, write_recipe, start):
    config = {
        "dtype": "float32",
        "max_batch_size": 4,
        "max_num_tokens": 64,
        "max_seq_len": 256,
        "kv_cache_config": {"tokens_per_block": SIZE, "max_tokens": 512, "host_cache_size": 16 << 20},
    }
    workers = {"decode": {"engine": "torch", "num_threads": 1, "replicas": 2, "engine_config": config}}
    server = start(write_recipe(sample_model("llama"), workers))
    until(lambda: total(server, "bireme_kv_feed_resyncs_total", worker="generate") >= 2, 60, "generate follows both")
    return server


def prompt(number):
    return [(7 * at + 13 * number) % 400 + 5 for at in range(200)]


def test_a_prompt_goes_where_host_memory_has_it_and_is_not_computed_again(server):
    client = Client(server.grpc)

    def ask(number, **fields):
        answer = client.generate(input_ids=prompt(number), max_tokens=4, stream=True, **fields)
        return answer["output_ids"], json.loads(answer["usage"])

    here, there = json.dumps({"decode_worker": "decode_1"}), json.dumps({"decode_worker": "decode"})
    low = json.dumps({"token_range_retention_configs": [{"token_start": 0, "priority": 1}]})
    first, _ = ask(1, routing=here)
    for number in range(2, 5):
        ask(number, routing=here)
    ask(5, routing=here, kv_cache_retention_config=low)
    for number in range(11, 16):  # that pool turns over as fast: what lies in host memory is all that differs
        ask(number, routing=there)
    told = {"worker": "decode_1", "type": "updated"}
    until(lambda: total(server, "bireme_kv_events_total", **told) >= 12, 30, "readers know that it was evicted")
    again, usage = ask(1)
    assert list(again) == list(first)
    assert (usage["decode_worker"], usage["predicted_cached_tokens"]) == ("decode_1", 192)
    from_host = {"worker": "decode_1", "tier": "host"}  # metrics follow within a second
    until(lambda: total(server, "bireme_kv_onboarded_blocks_total", **from_host) == 12, 30, "blocks have come back")
    until(lambda: total(server, "bireme_kv_matched_tokens_total", **from_host) == 192, 30, "tokens were found")


def test_a_retention_that_no_cache_can_do_is_refused_by_its_name(server):
    wrong = json.dumps({"decode_retention_priority": 101})
    with pytest.raises(Exception, match="kv_cache_retention_config.decode_retention_priority: 101; 0 to 100"):
        Client(server.grpc).generate(input_ids=prompt(9), max_tokens=1, stream=True, kv_cache_retention_config=wrong)
