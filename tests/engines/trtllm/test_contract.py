"""The contract's settings classes by release, and the check of a YAML against them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.config import CHECKOUT
from bireme.engines.trtllm import contract
from bireme.engines.trtllm.contract import CEILING, FLOOR, all_fields, fields, profile, validate
from bireme.engines.trtllm.problems import errors
from tools.describe_trtllm import rows_of_contract

CLASSES = contract.contract()["config_classes"]
PLAIN = [name for name, entry in CLASSES.items() if "discriminator" not in entry]
MODEL = {"model": "org/model"}
WHOLE = ("imports", "guided_decoding_params", "scheduling_params", "config_classes")  # sections that are gone through


def messages(tree, version=FLOOR, name="LlmArgs"):
    return [str(problem) for problem in validate(MODEL | tree if name == "LlmArgs" else tree, name, version)]


@pytest.fixture(scope="module")
def code():
    return [path.read_text() for name in ("bireme", "tests", "tools") for path in (CHECKOUT / name).rglob("*.py")]


# the notation and the facts


@pytest.mark.parametrize("section", contract.contract())
def test_whatever_stands_in_the_contract_is_read(section, code):
    readers = [text for text in code if f'["{section}"]' in text]
    parts = () if section in WHOLE else contract.contract()[section]
    assert readers and [part for part in parts if not any(f'"{part}"' in text for text in readers)] == []


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("release", contract.PROFILES)
def test_every_class_can_be_read(name, release):
    found = all_fields(name, release)
    assert all(field.name == key for key, field in found.items())


@pytest.mark.parametrize("name", PLAIN)
def test_defaults_fit_their_types(name):
    for release in contract.PROFILES:
        for field in all_fields(name, release).values():
            has_default = field.default not in (None, "factory")
            assert not has_default or field.type.takes(field.default), (name, field.name)


def test_class_names_in_types_are_classes():
    for name in PLAIN:
        for field in all_fields(name, "1.3").values():
            assert not field.type.class_name or field.type.class_name in CLASSES, (name, field.name)


def test_the_arguments_are_those_that_were_read_at_1_2_1():
    facts = contract.contract()
    own = facts["llm"]["explicit_ctor_args"].keys() - {"**kwargs"}
    assert fields("LlmArgs", FLOOR).keys() == own | facts["torch_llm_args"]["v1_2_1"].keys()


def listed(release="1.3.0rc29"):
    """Return what was read of a release, of 1.3.0rc29 its own field manifest: path -> words."""
    lines = Path(__file__).with_name(f"fields_{release}.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {path: frozenset(words) for path, *words in rows}


@pytest.mark.parametrize("release", ["1.3", "1.4"])
def test_every_setting_that_1_3_0rc29_lists_is_in_the_contract_with_its_words(release):
    known = rows_of_contract(release)
    assert [path for path in listed() if path not in known] == []
    without = {path: words - known[path] for path, words in listed().items() if known[path]}
    assert {path: words for path, words in without.items() if words} == {}


@pytest.mark.parametrize("release", ["1.3", "1.4"])
def test_the_contract_takes_no_words_that_1_3_0rc29_does_not_list(release):
    known = rows_of_contract(release)
    more = {path: known[path] - words for path, words in listed().items() if words}
    assert {path: words for path, words in more.items() if words} == {"backend": {"_autodeploy", "tensorrt"}}


def test_blocks_have_the_fields_that_were_read_at_1_2_1():
    read = set(listed("1.2.1"))
    blocks = {path.partition(".")[0] for path in read}
    assert {path for path in rows_of_contract("1.2") if path.partition(".")[0] in blocks} == read


def test_every_default_of_the_facts_is_the_field_s():
    for name, entry in contract.contract()["torch_llm_args"]["v1_2_1"].items():
        said, field = entry[1], fields("LlmArgs", FLOOR)[name]
        if said in (None, True, False) or isinstance(said, int | float):
            assert field.default == said, name


# what is refused


def test_the_bare_model_is_enough():
    assert messages({}) == []


def test_a_typo_is_told_with_the_nearest_name():
    assert messages({"max_batchsize": 3}) == [
        "max_batchsize: 3; TensorRT-LLM 1.2 has no such key in LlmArgs; did you mean max_batch_size?"
    ]


def test_what_is_quantized_is_the_checkpoint_s_to_say():
    (message,) = messages({"quant_config": {"quant_algo": "FP8", "exclude_modules": ["*self_attn*"]}})
    assert message.endswith(
        "; the PyTorch backend reads it, and which modules are plain, from the checkpoint; remove it, and serve a"
        " quantized checkpoint (hf_quant_config.json, or quantization_config in config.json)"
    )


def test_a_block_s_field_is_checked_as_deep_as_it_lies():
    (message,) = messages({"scheduler_config": {"dynamic_batch_config": {
        "enable_batch_size_tuning": True, "enable_max_num_tokens_tuning": "no",
        "dynamic_batch_moving_average_window": 128}}})  # fmt: skip
    assert message.startswith("scheduler_config.dynamic_batch_config.enable_max_num_tokens_tuning: 'no';")


def test_1_2_needs_all_of_dynamic_batching_and_1_3_none():
    tree = {"scheduler_config": {"dynamic_batch_config": {}}}
    assert len(messages(tree, FLOOR)) == 3 and messages(tree, CEILING) == []


# Each setting that late releases have and 1.2 has not, with a value of its own: one of blocks that are chosen by a word
# stands beside that word.
NEW = """
checkpoint_io_policy: native
disable_mm_encoder: true
dwdp_config: {dwdp_size: 2, num_groups: 1, num_experts_per_worker: 1, num_prefetch_experts: 1, contention_opt: true}
enable_early_first_token_response: true
enable_encoder_decoder_mixed_cuda_graph: true
enable_energy_metrics: true
enable_in_graph_sampling: true
enable_low_latency_host_dispatch: true
enable_mla_skip_correction: true
enable_resource_governor: true
enable_speculative_beam_history_d2h: true
encoder_cuda_graph_config: {max_batch_size: 4, seq_lens: [16]}
encoder_max_batch_size: 4
encoder_max_num_tokens: 1024
generation_config: auto
gms_config: {mode: rw}
kv_cache_compression_config: {algorithm: triattention, calibration_path: x.pt}
mla_skip_correction_threshold: 4.0
multimodal_config: {encoder_cache_max_bytes: 512MB, encoder_scheduling_policy: EAGER}
mx_config: {preshard_strategy: per_module}
num_serve_frontends: 2
prefill_capture_num_tokens: [128, 256]
prefill_cuda_graph_backend: piecewise
prometheus_metrics_config: {time_to_first_token_buckets: [0.1, 1]}
reorder_policy_config: {policy_name: AgentTree, policy_args: {agent_percentage: 0.5}}
use_cute_dsl_bf16_bmm: true
use_cute_dsl_bf16_gemm: true
use_fine_grained_sync: true
perf_metrics_output_dir: /tmp
post_processor_hook: package.module:hook
sleep_config: {restore_modes: {kv_cache: NONE}}
kv_cache_config: {block_reuse_config: {policy: per_conversation, max_num_turns: 3}}
kv_cache_config: {fp8_context_mla_kv_len_cap: 4096}
kv_cache_config: {kv_pool_rebalance_check_interval: 20}
kv_cache_config: {kv_pool_rebalance_cooldown_secs: 1}
kv_cache_config: {kv_pool_rebalance_min_sampled_kv_caches: 8}
kv_cache_config: {kv_pool_rebalance_moving_average_decay: 0.5}
kv_cache_config: {kv_pool_rebalance_ratio_threshold: 1.5}
kv_cache_config: {kv_pool_rebalance_target_ratio_update_interval: 20}
kv_cache_config: {dtype: fp8_ds_mla}
kv_cache_config: {kv_events_config: {enable_kv_cache_events: true, publisher: zmq}}
kv_cache_config: {mamba_state_config: {periodic_snapshot_interval: 0}}
scheduler_config: {use_python_scheduler: true}
scheduler_config: {enable_prefix_aware_scheduling: true}
scheduler_config: {context_chunking_policy: FORCE_CHUNK}
attention_dp_config: {enable_kv_cache_aware_routing: true}
attention_dp_config: {kv_cache_routing_load_balance_weight: 0.5}
attention_dp_config: {kv_cache_routing_match_rate_threshold: 0.5}
attention_dp_config: {kv_cache_routing_fair_share_multiplier: 2.0}
attention_dp_config: {kv_cache_routing_cold_start_warmup: true}
attention_dp_config: {kv_cache_routing_account_for_in_transfer: true}
attention_dp_config: {kv_cache_routing_max_sessions: 10}
attention_dp_config: {kv_cache_routing_new_conv_placement: least_tokens}
cache_transceiver_config: {backend: NIXL, enable_pipelined_transfer: true}
cache_transceiver_config: {backend: NIXL, kv_transfer_poll_interval_ms: null}
cuda_graph_config: {mode: encode}
cuda_graph_config: {num_tokens: [128]}
cuda_graph_config: {max_num_token: 128}
cuda_graph_config: {seq_lens: [16]}
cuda_graph_config: {max_seq_len: 16}
lora_config: {overlap_lora_and_base: true}
lora_config: {cuda_graph_specialize_lora: true}
kv_connector_config: {connector: lmcache}
kv_connector_config: {connector: kvbm}
nvfp4_gemm_config: {allowed_backends: [marlin]}
moe_config: {backend: DENSEGEMM}
moe_config: {backend: MARLIN}
moe_config: {backend: MEGAMOE_DEEPGEMM}
moe_config: {backend: MEGAMOE_CUTEDSL}
sparse_attention_config: {algorithm: dsa, use_cute_dsl_topk: true}
sparse_attention_config: {algorithm: dsa, use_cute_dsl_paged_mqa_logits: true}
sparse_attention_config: {algorithm: dsa, q_split_threshold: 4096}
sparse_attention_config: {algorithm: dsa, indexer_rope_interleave: true}
sparse_attention_config: {algorithm: dsa, enable_heuristic_topk: true}
sparse_attention_config: {algorithm: dsa, use_self_sampling_topk: false}
sparse_attention_config: {algorithm: dsa, use_gvr_emission: true}
sparse_attention_config: {algorithm: dsa, indexer_k_dtype: fp4}
sparse_attention_config: {algorithm: dsa, index_share_for_mtp_iteration: true}
sparse_attention_config: {algorithm: deepseek_v4, window_size: 64, indexer_k_dtype: fp8}
sparse_attention_config: {algorithm: deepseek_v4, compress_ratios: [1, 4]}
sparse_attention_config: {algorithm: minimax_m3, sparse_num_index_heads: 4}
sparse_attention_config: {algorithm: minimax_m3, sparse_index_dim: 64}
sparse_attention_config: {algorithm: minimax_m3, sparse_block_size: 64}
sparse_attention_config: {algorithm: minimax_m3, sparse_topk_blocks: 8}
sparse_attention_config: {algorithm: minimax_m3, sparse_init_blocks: 1}
sparse_attention_config: {algorithm: minimax_m3, sparse_local_blocks: 2}
sparse_attention_config: {algorithm: minimax_m3, sparse_score_type: max}
sparse_attention_config: {algorithm: minimax_m3, sparse_disable_index_value: false}
sparse_attention_config: {algorithm: minimax_m3, indexer_kv_dtype: fp8}
sparse_attention_config: {algorithm: minimax_m3, num_attention_heads: 8}
sparse_attention_config: {algorithm: minimax_m3, num_key_value_heads: 2}
sparse_attention_config: {algorithm: minimax_m3, implementation: msa}
sparse_attention_config: {algorithm: minimax_m3, fuse_qkv_index_projection: true}
sparse_attention_config: {algorithm: qsa}
sparse_attention_config: {algorithm: skip_softmax, target_sparsity: 0.5}
sparse_attention_config: {algorithm: skip_softmax, uses_spcompress: true}
speculative_config: {decoding_type: MTP, acceptance_rate_window_size: 3}
speculative_config: {decoding_type: MTP, acceptance_rate_threshold: 0.5}
speculative_config: {decoding_type: MTP, advanced_sampling_mode: no_topk}
speculative_config: {decoding_type: MTP, use_rejection_sampling: true}
speculative_config: {decoding_type: MTP, enable_penalty: true}
speculative_config: {decoding_type: MTP, moe_backend: CUTEDSL}
speculative_config: {decoding_type: MTP, sa_config: {threshold: 2, enable_global_pool: true}}
speculative_config: {decoding_type: DFlash, target_layer_ids: [1]}
speculative_config: {decoding_type: DFlash, attention_backend: FA4}
speculative_config: {decoding_type: DFlash, skip_ctx_buffer_budget_check: true}
speculative_config: {decoding_type: DSpark, block_size: 4}
speculative_config: {decoding_type: DSpark, markov_rank: 2}
speculative_config: {decoding_type: DSpark, markov_head_type: rnn}
speculative_config: {decoding_type: SA, enable_global_pool: true}
speculative_config: {decoding_type: SA, global_pool_size: 4}
"""


@pytest.mark.parametrize("text", NEW.strip().splitlines())
def test_what_late_releases_know_is_taken_for_them_and_told_for_1_2(text):
    assert messages(yaml.safe_load(text), CEILING) == []
    assert messages(yaml.safe_load(text), FLOOR) != []


def test_a_load_format_may_be_written_small():
    assert messages({"load_format": "dummy"}, CEILING) == []


GONE = {
    "enable_sleep: true": "set sleep_config: {}",
    "disable_flashinfer_sampling: true": "remove it",
    "kv_cache_config: {block_reuse_policy: per_request}": "set block_reuse_config.policy",
    "attention_dp_config: {kv_cache_routing: {}}": "set enable_kv_cache_aware_routing",
    "cp_config: {cp_anchor_size: 3}": "remove it",
    "cp_config: {block_size: 3}": "remove it",
    "cp_config: {cp_type: STAR}": "set HELIX or ULYSSES",
    "moe_config: {backend: WIDEEP}": "set CUTEDSL for NVFP4, DEEPGEMM for FP8 block scales",
    "speculative_config: {decoding_type: MTP, acceptance_window: 3}": "set acceptance_rate_window_size",
    "speculative_config: {decoding_type: MTP, acceptance_length_threshold: 3}": "set acceptance_rate_threshold",
    "speculative_config: {decoding_type: MTP, num_nextn_predict_layers_from_model_config: 3}": "remove it",
    "speculative_config: {decoding_type: Eagle3, eagle_choices: [[0]]}": "set use_dynamic_tree",
    "speculative_config: {decoding_type: Lookahead}": "known: Eagle, Eagle3",
    "speculative_config: {decoding_type: Medusa}": "known: Eagle, Eagle3",
}


@pytest.mark.parametrize("version", ["1.3.0rc29", CEILING])
@pytest.mark.parametrize("text", GONE)
def test_what_late_releases_have_lost_is_told_with_what_to_do_instead(text, version):
    (problem,) = validate(MODEL | yaml.safe_load(text), "LlmArgs", version)
    assert problem.severity == "error" and problem.is_by_release and GONE[text] in problem.remedy


DEPRECATED = {
    "perf_metrics_max_requests: 3": "no longer kept",
    "moe_cluster_parallel_size: 1": "remove it",
    "torch_compile_config: {enable_piecewise_cuda_graph: true}": "set prefill_cuda_graph_backend: piecewise",
    "torch_compile_config: {capture_num_tokens: [8]}": "set prefill_capture_num_tokens",
    "kv_cache_config: {sink_token_length: 4}": "ignores it",
    "kv_cache_config: {mamba_state_cache_interval: 0}": "set mamba_state_config.periodic_snapshot_interval",
    "speculative_config: {decoding_type: MTP, allow_advanced_sampling: true}": "remove it",
}


@pytest.mark.parametrize("text", DEPRECATED)
def test_what_late_releases_only_tolerate_is_a_warning_there(text):
    (problem,) = validate(MODEL | yaml.safe_load(text), "LlmArgs", CEILING)
    assert problem.severity == "warning" and DEPRECATED[text] in problem.remedy
    if "mamba" not in text:
        assert messages(yaml.safe_load(text), FLOOR) == []


def test_a_new_key_names_its_release_and_a_removed_one_too():
    assert "new in TensorRT-LLM 1.3" in messages({"model_kwargs": {}}, FLOOR)[0]
    assert "gone in TensorRT-LLM 1.3" in messages({"kv_cache_config": {"onboard_blocks": True}}, CEILING)[0]
    assert messages({"model_kwargs": {}}, CEILING) == []


def test_an_enum_s_newer_value_is_refused_in_the_older_release():
    tree = {"moe_config": {"backend": "AUTO"}}
    assert "CUTLASS, CUTEDSL" in messages(tree, FLOOR)[0] and messages(tree, CEILING) == []


def test_the_remedy_of_a_retired_key_is_one_that_the_release_takes():
    tree = {"enable_trtllm_sampler": True}
    assert "set sampler_type: TRTLLMSampler" in messages(tree, FLOOR)[0]
    assert "TRTLLMSampler" not in messages(tree, CEILING)[0]


def test_union_classes_are_chosen_by_their_key():
    drafts = {"decoding_type": "MTP", "num_nextn_predict_layers": 1, "eagle3_one_model": True}
    (message,) = messages({"speculative_config": drafts})
    assert message.startswith("speculative_config.eagle3_one_model: true;") and "MTPDecodingConfig" in message
    assert "missing; it says which kind" in messages({"sparse_attention_config": {}})[0]


@pytest.mark.parametrize(
    ("kind", "releases"),
    [
        ("DraftTarget", {"1.2"}),
        ("Draft_Target", {"1.3", "1.4"}),
        ("Eagle3", {"1.3", "1.4"}),
        ("Eagle", {"1.2", "1.3", "1.4"}),
    ],
)
def test_kinds_of_drafts_come_and_go(kind, releases):
    tree = {"speculative_config": {"decoding_type": kind}}
    taken = {profile(version) for version in contract.VERSIONS.values() if not messages(tree, version)}
    assert taken == releases


def test_the_alias_of_the_draft_model_is_taken():
    drafts = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "org/eagle"}
    assert messages({"speculative_config": drafts}) == []


def test_autodeploy_has_its_own_arguments_beside_the_others():
    tree = MODEL | {"world_size": 4, "transforms": {}, "kv_cache_config": {"tokens_per_block": 64}}
    assert validate(tree, "AutoDeployLlmArgs", FLOOR) == []
    assert messages({"world_size": 4})[0].startswith("world_size: 4; TensorRT-LLM 1.2 has no such key")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("1.1.0", "1.2"), ("1.2.0", "1.2"), ("1.3.0rc29", "1.3"), ("1.4.0rc1", "1.4"), ("1.5.0", "1.4")],
)
def test_a_release_has_the_nearest_profile(version, expected):
    assert profile(version) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*fields("LlmArgs", FLOOR), "typo"]), JSON, max_size=6))
@settings(deadline=None)
def test_any_tree_gets_problems_that_can_be_read_and_stand_in_it(tree):
    for problem in validate(MODEL | tree, "LlmArgs", FLOOR):
        assert problem.path[0] in tree or problem.path[0] in MODEL
        assert problem.key and problem.reason and problem.remedy and str(problem).startswith(problem.key)


@given(st.data())
@settings(deadline=None)
def test_a_tree_of_defaults_is_never_refused(data):
    release = data.draw(st.sampled_from(contract.PROFILES))
    known = [
        one for one in all_fields("LlmArgs", release).values() if one.type.is_writable and one.default != "factory"
    ]
    chosen = data.draw(st.lists(st.sampled_from(known), max_size=8))
    tree = MODEL | {one.name: one.default for one in chosen if one.name != "model"}
    assert errors(validate(tree, "LlmArgs", release + ".1")) == []
