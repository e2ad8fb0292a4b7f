"""What the LLM is made with: defaults, what is left out, and what AutoDeploy can't take."""

from __future__ import annotations

import pytest

from bireme.config import EngineConfig
from bireme.engines.trtllm.api import set_log_level
from bireme.engines.trtllm.arguments import complete
from bireme.engines.trtllm.config import llm_arguments
from bireme.engines.trtllm.contract import contract, fields
from bireme.errors import ConfigError

WINDOW = {
    "enable_batch_size_tuning": True,
    "enable_max_num_tokens_tuning": False,
    "dynamic_batch_moving_average_window": 128,
}


def test_running_requests_are_never_evicted_and_the_batch_follows_the_load():
    scheduler = complete({"model": "m"}).values["scheduler_config"]
    assert scheduler == {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT", "dynamic_batch_config": WINDOW}


def test_a_scheduler_key_of_the_yaml_wins_and_the_others_stay():
    given = {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION", "context_chunking_policy": None}}
    scheduler = complete(given).values["scheduler_config"]
    assert scheduler == {"capacity_scheduler_policy": "MAX_UTILIZATION", "dynamic_batch_config": WINDOW}


def test_kv_cache_keys_that_are_not_set_stay_unset():
    """A model's own defaults hold only while nothing is set."""
    assert complete({"kv_cache_config": {"dtype": "fp8"}}).values["kv_cache_config"] == {"dtype": "fp8"}
    assert "kv_cache_config" not in complete({}).values


def test_postprocess_workers_are_left_out():
    config = EngineConfig(llm_args={"num_postprocess_workers": 4, "max_batch_size": 3})
    values = complete(llm_arguments(config, "m", "decode")).values
    assert "num_postprocess_workers" not in values and values["max_batch_size"] == 3


def test_no_tokenizer_is_loaded_unless_guides_need_one():
    assert complete({}).values["skip_tokenizer_init"] is True
    assert complete({"guided_decoding_backend": "xgrammar"}).values["skip_tokenizer_init"] is False


def test_a_transfer_has_a_time_limit():
    given = {"cache_transceiver_config": {"backend": "UCX"}}
    assert complete(given).values["cache_transceiver_config"]["kv_transfer_timeout_ms"] == 60_000
    own = {"cache_transceiver_config": {"backend": "UCX", "kv_transfer_timeout_ms": 5}}
    assert complete(own).transfer_timeout_ms == 5


@pytest.mark.parametrize("backend", ["tensorrt", "vllm"])
def test_other_backends_are_refused_by_name(backend):
    with pytest.raises(ConfigError, match=f"backend: '{backend}'; available backends: pytorch, _autodeploy"):
        complete({"backend": backend})


def test_autodeploy_gets_nothing_that_it_refuses():
    refused = contract()["autodeploy_llm_args"]["reject_if_not_default"]
    given = dict.fromkeys(refused, 2) | {"scheduler_config": {}, "max_batch_size": 4, "backend": "_autodeploy"}
    values = complete(given).values
    assert not values.keys() & {*refused, "scheduler_config"}
    assert (values["world_size"], values["max_batch_size"]) == (2, 4)


def test_a_world_size_of_the_yaml_wins():
    values = complete({"backend": "_autodeploy", "world_size": 8, "tensor_parallel_size": 2}).values
    assert values["world_size"] == 8


def test_limits_that_are_not_set_are_tensorrt_llm_s_own():
    found, own = complete({}), fields("LlmArgs")
    assert found.max_batch_size == own["max_batch_size"].default == 2048
    assert found.max_num_tokens == own["max_num_tokens"].default == 8192
    assert found.tokens_per_block == fields("KvCacheConfig")["tokens_per_block"].default == 32


def test_statistics_are_asked_for_because_by_default_there_are_none():
    assert fields("LlmArgs")["enable_iter_perf_stats"].default is False
    assert complete({}).values["enable_iter_perf_stats"] is True
    assert complete({"enable_iter_perf_stats": False}).values["enable_iter_perf_stats"] is False


def test_attention_dp_has_as_many_ranks_as_gpus():
    assert complete({"tensor_parallel_size": 8, "enable_attention_dp": True}).attention_dp_size == 8
    assert complete({"tensor_parallel_size": 8}).attention_dp_size == 1


@pytest.mark.parametrize(
    ("speculation", "longest"),
    [
        (None, 0), ({"decoding_type": "Eagle", "max_draft_len": 3}, 3), ({"decoding_type": "MTP"}, 1),
        ({"decoding_type": "MTP", "num_nextn_predict_layers": 2}, 2), ({"decoding_type": "User_Provided"}, 0),
    ],
)  # fmt: skip
def test_the_longest_draft_is_told_as_the_settings_have_it(speculation, longest):
    assert complete({"speculative_config": speculation}).draft_len == longest


@pytest.mark.parametrize(
    "ours, theirs", [("debug", "DEBUG"), ("INFO", "INFO"), ("WARN", "WARNING"), ("CRITICAL", "INTERNAL_ERROR")]
)
def test_log_levels_are_mapped(ours, theirs):
    environment = {"BIREME_LOG_LEVEL": ours}
    set_log_level(environment)
    assert environment["TLLM_LOG_LEVEL"] == theirs


def test_a_log_level_of_its_own_wins():
    environment = {"BIREME_LOG_LEVEL": "DEBUG", "TLLM_LOG_LEVEL": "ERROR"}
    set_log_level(environment)
    assert environment["TLLM_LOG_LEVEL"] == "ERROR"
