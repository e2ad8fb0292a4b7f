"""Rules across fields: each finds what it is for, and lets its neighbor pass."""

from __future__ import annotations

import json

import pytest

from bireme.config import EngineConfig, Recipe, WorkerEntry
from bireme.engines.trtllm import pair_rules, transceivers
from bireme.engines.trtllm.engine_yaml import Yaml
from bireme.engines.trtllm.rules import RULES, check_rules, generated_graph_sizes

PREFILL, DECODE = "prefill", "decode"
UCX = {"backend": "UCX", "max_tokens_in_buffer": 4096}
EAGLE = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": "org/eagle"}
NO_REUSE = {"enable_block_reuse": False}

# rule -> (what breaks it, the key and severity of its finding, what passes); `stage` and `release` are not YAML
CASES: dict[str, list[tuple[dict, str, str, dict]]] = {
    "moe_sizes_fill_the_tensor_parallel_group": [
        ({"tensor_parallel_size": 4, "moe_expert_parallel_size": 3}, "moe_expert_parallel_size", "error",
         {"tensor_parallel_size": 4, "moe_expert_parallel_size": 2}),
        ({"tensor_parallel_size": 4, "moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 4},
         "moe_tensor_parallel_size", "error",
         {"tensor_parallel_size": 8, "moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 4}),
    ],
    "moe_sizes_are_counts": [
        ({"tensor_parallel_size": 4, "moe_expert_parallel_size": 0}, "moe_expert_parallel_size", "error",
         {"tensor_parallel_size": 4, "moe_expert_parallel_size": -1, "moe_cluster_parallel_size": -1}),
        ({"tensor_parallel_size": 4, "moe_expert_parallel_size": 4, "moe_cluster_parallel_size": 0},
         "moe_cluster_parallel_size", "error", {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4}),
    ],
    "pipeline_partition_has_a_part_for_each_stage": [
        ({"pipeline_parallel_size": 2, "pp_partition": [8]}, "pp_partition", "error",
         {"pipeline_parallel_size": 2, "pp_partition": [8, 8]}),
    ],
    "attention_dp_options_need_attention_dp": [
        ({"enable_lm_head_tp_in_adp": True}, "enable_lm_head_tp_in_adp", "error",
         {"enable_lm_head_tp_in_adp": True, "enable_attention_dp": True}),
        ({"attention_dp_config": {"enable_balance": True}}, "attention_dp_config", "warning",
         {"attention_dp_config": {"enable_balance": True}, "enable_attention_dp": True}),
    ],
    "ray_options_need_ray": [
        ({"ray_worker_extension_cls": "x.Y"}, "ray_worker_extension_cls", "error",
         {"ray_worker_extension_cls": "x.Y", "orchestrator_type": "ray"}),
    ],
    "helix_has_the_kv_cache_s_blocks": [
        ({"context_parallel_size": 2, "cp_config": {"cp_type": "HELIX", "tokens_per_block": 16}},
         "cp_config.tokens_per_block", "error",
         {"context_parallel_size": 2, "cp_config": {"cp_type": "HELIX", "tokens_per_block": 32}}),
    ],
    "expert_slots_divide_by_the_ranks": [
        ({"moe_expert_parallel_size": 16, "moe_config": {"load_balancer": {"num_slots": 300}}},
         "moe_config.load_balancer.num_slots", "error",
         {"moe_expert_parallel_size": 16, "moe_config": {"load_balancer": {"num_slots": 288}}}),
    ],
    "expert_assignments_fill_the_slots": [
        ({"moe_config": {"load_balancer": {"num_slots": 3, "initial_global_assignments": {5: [0, 1]}}}},
         "moe_config.load_balancer.initial_global_assignments.5", "error",
         {"moe_config": {"load_balancer": {"num_slots": 2, "initial_global_assignments": {5: [0, 1]}}}}),
    ],
    "expert_balancing_needs_expert_parallelism": [
        ({"moe_config": {"load_balancer": {"num_slots": 8}}}, "moe_config.load_balancer", "error",
         {"moe_config": {"load_balancer": {"num_slots": 8}}, "moe_expert_parallel_size": 2}),
    ],
    "wide_expert_parallelism_needs_attention_dp": [
        ({"moe_config": {"backend": "WIDEEP"}}, "moe_config.backend", "error",
         {"moe_config": {"backend": "WIDEEP"}, "enable_attention_dp": True}),
    ],
    "long_prompts_need_chunks": [
        ({"max_num_tokens": 256, "max_seq_len": 8448}, "max_num_tokens", "warning",
         {"max_num_tokens": 256, "max_seq_len": 8448, "enable_chunked_prefill": True}),
        ({"max_seq_len": 16384}, "max_num_tokens", "warning", {"max_seq_len": 8192}),
    ],
    "a_step_holds_the_whole_batch": [
        ({"max_num_tokens": 64, "max_batch_size": 128}, "max_batch_size", "warning",
         {"max_num_tokens": 128, "max_batch_size": 128}),
    ],
    "the_input_leaves_room_for_output": [
        ({"max_input_len": 100, "max_seq_len": 100}, "max_input_len", "error",
         {"max_input_len": 99, "max_seq_len": 100}),
    ],
    "graph_sizes_are_said_once": [
        ({"cuda_graph_config": {"batch_sizes": [1, 8], "max_batch_size": 8}}, "cuda_graph_config.max_batch_size",
         "error", {"cuda_graph_config": {"batch_sizes": [4, 1, 2, 8], "max_batch_size": 8, "enable_padding": True}}),
    ],
    "graphs_fit_the_batch": [
        ({"max_batch_size": 8, "cuda_graph_config": {"batch_sizes": [1, 16]}}, "cuda_graph_config.batch_sizes",
         "warning", {"max_batch_size": 16, "cuda_graph_config": {"batch_sizes": [1, 16]}}),
        ({"max_batch_size": 8, "cuda_graph_config": {"max_batch_size": 16}}, "cuda_graph_config.max_batch_size",
         "warning", {"max_batch_size": 8, "cuda_graph_config": None}),
    ],
    "drafts_have_a_model": [
        ({"speculative_config": {"decoding_type": "Eagle", "max_draft_len": 3}},
         "speculative_config.speculative_model", "error", {"speculative_config": EAGLE}),
    ],
    "drafts_have_a_length": [
        ({"speculative_config": EAGLE | {"max_draft_len": 0}}, "speculative_config.max_draft_len", "error",
         {"speculative_config": {"decoding_type": "MTP"}}),
    ],
    "n_grams_have_a_size": [
        ({"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}},
         "speculative_config.max_matching_ngram_size", "error",
         {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}, "release": "1.3"}),
    ],
    "schedules_of_drafts_begin_with_their_length": [
        ({"speculative_config": EAGLE | {"draft_len_schedule": {"1": 2}}}, "speculative_config.draft_len_schedule",
         "error", {"speculative_config": EAGLE | {"draft_len_schedule": {1: 3, 8: 0}}}),
    ],
    "drafting_runs_on_this_backend": [
        ({"speculative_config": {"decoding_type": "Medusa"}}, "speculative_config.decoding_type", "error",
         {"speculative_config": {"decoding_type": "MTP"}}),
        ({"speculative_config": EAGLE, "pipeline_parallel_size": 2}, "pipeline_parallel_size", "error",
         {"pipeline_parallel_size": 2}),
    ],
    "drafts_fit_a_step": [
        ({"speculative_config": EAGLE, "max_num_tokens": 1000, "max_batch_size": 256,
          "cuda_graph_config": {"max_batch_size": 256}}, "max_num_tokens", "error",
         {"speculative_config": EAGLE, "max_num_tokens": 1024, "max_batch_size": 256,
          "cuda_graph_config": {"max_batch_size": 256}}),
        ({"speculative_config": {"decoding_type": "MTP"}, "max_num_tokens": 255}, "max_num_tokens", "error",
         {"speculative_config": {"decoding_type": "MTP"}, "max_num_tokens": 255, "cuda_graph_config": None}),
    ],
    "eagle_reuses_no_blocks": [
        ({"speculative_config": EAGLE}, "kv_cache_config.enable_block_reuse", "warning",
         {"speculative_config": EAGLE, "kv_cache_config": NO_REUSE}),
    ],
    "windows_limit_reuse": [
        ({"max_seq_len": 1024, "kv_cache_config": {"max_attention_window": [512]}},
         "kv_cache_config.max_attention_window", "warning",
         {"max_seq_len": 1024, "kv_cache_config": {"max_attention_window": [512, 1024]}}),
    ],
    "events_need_reuse": [
        ({"kv_cache_config": NO_REUSE | {"event_buffer_max_size": 9}}, "kv_cache_config.event_buffer_max_size",
         "error", {"kv_cache_config": {"event_buffer_max_size": 9}}),
    ],
    "the_host_tier_holds_reusable_blocks": [
        ({"kv_cache_config": NO_REUSE | {"host_cache_size": 9}}, "kv_cache_config.host_cache_size", "warning",
         {"kv_cache_config": {"host_cache_size": 9}}),
    ],
    "block_managers_share_whole_blocks": [
        ({"kv_connector_config": {"connector_module": "kvbm.x"}}, "kv_cache_config.enable_partial_reuse", "error",
         {"kv_connector_config": {"connector_module": "kvbm.x"}, "kv_cache_config": {"enable_partial_reuse": False}}),
        ({"release": "1.3", "kv_connector_config": {"connector": "kvbm"}}, "kv_cache_config.enable_partial_reuse",
         "error", {"release": "1.3", "kv_connector_config": {"connector": "lmcache"}}),
        ({"kv_connector_config": {"connector_module": "kvbm.x"}}, "cuda_graph_config", "warning",
         {"kv_connector_config": {"connector_module": "kvbm.x"}, "cuda_graph_config": None}),
    ],
    "prefill_runs_without_overlap": [
        ({"stage": PREFILL}, "disable_overlap_scheduler", "error", {"stage": PREFILL, "release": "1.3"}),
        ({"stage": PREFILL, "disable_overlap_scheduler": False}, "disable_overlap_scheduler", "error",
         {"stage": PREFILL, "disable_overlap_scheduler": True}),
    ],
    "transfer_has_a_backend": [
        ({"split": True}, "cache_transceiver_config.backend", "error", {"cache_transceiver_config": UCX}),
    ],
    "transfer_has_a_buffer_for_the_longest_prompt": [
        ({"split": True, "cache_transceiver_config": UCX, "max_seq_len": 8192},
         "cache_transceiver_config.max_tokens_in_buffer", "error",
         {"split": True, "cache_transceiver_config": UCX, "max_seq_len": 8192, "max_input_len": 4096}),
        ({"split": True, "cache_transceiver_config": {"backend": "UCX"}},
         "cache_transceiver_config.max_tokens_in_buffer", "warning", {"split": True, "cache_transceiver_config": UCX}),
    ],
    "transceivers_speak_what_their_runtime_can": [
        ({"release": "1.3", "cache_transceiver_config": {"backend": "UCX", "transceiver_runtime": "PYTHON"}},
         "cache_transceiver_config.backend", "error",
         {"release": "1.3", "cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": "PYTHON"}}),
        *(
            ({"release": release, "model": model, "cache_transceiver_config": UCX},
             "cache_transceiver_config.backend", "error", good)
            for release in ("1.3", "1.4")
            for model in ("openai/gpt-oss-120b", "nvidia/DeepSeek-R1-FP4", "google/gemma-3-1b-it",
                          "nvidia/Llama-4-Maverick-17B-128E-Instruct-FP8", "meta-llama/Llama-3.1-8B-Instruct")
            for good in (
                {"release": "1.2", "model": model, "cache_transceiver_config": UCX},
                {"release": release, "model": model, "cache_transceiver_config": UCX | {"backend": "DEFAULT"}},
                {"release": release, "model": model, "cache_transceiver_config": UCX | {"transceiver_runtime": "CPP"}},
                {"release": release, "model": model, "cache_transceiver_config": UCX | {"transceiver_runtime": None}},
                {"release": release, "model": "Qwen/Qwen3-0.6B", "cache_transceiver_config": UCX},
                {"release": release, "model": "org/DeepSeek-R1-Distill-Qwen-7B", "cache_transceiver_config": UCX},
            )
        ),
    ],
    "connectors_have_a_name_or_classes": [
        ({"release": "1.3", "kv_connector_config": {"connector_module": "x"}},
         "kv_connector_config.connector_worker_class", "error",
         {"release": "1.3", "kv_connector_config": {"connector": "lmcache"}}),
    ],
    "native_events_leave_ours_empty": [
        ({"kv_cache_config": {"kv_events_config": {"enable_kv_cache_events": True}}},
         "kv_cache_config.kv_events_config", "warning",
         {"kv_cache_config": {"kv_events_config": {"enable_kv_cache_events": False}}}),
    ],
    "drafts_are_one_model": [
        ({"release": "1.3", "speculative_config": EAGLE | {"eagle3_one_model": False}},
         "speculative_config.eagle3_one_model", "error",
         {"release": "1.2", "speculative_config": EAGLE | {"eagle3_one_model": False}}),
    ],
    "expert_balancing_needs_a_backend_that_has_it": [
        ({"moe_config": {"backend": "TRITON", "load_balancer": {"num_slots": 4}}}, "moe_config.backend", "error",
         {"moe_config": {"backend": "CUTEDSL", "load_balancer": {"num_slots": 4}}}),
    ],
    "only_living_samplers": [
        ({"release": "1.3", "sampler_type": "TRTLLMSampler"}, "sampler_type", "error",
         {"release": "1.2", "sampler_type": "TRTLLMSampler"}),
    ],
    "prompts_find_room_beside_a_full_batch": [
        ({"max_batch_size": 256, "max_num_tokens": 256}, "max_num_tokens", "warning",
         {"max_batch_size": 256, "max_num_tokens": 8448}),
    ],
    "kv_cache_manager_v2_does_not_sleep": [
        ({"release": "1.4", "sleep_config": {}}, "sleep_config", "warning", {"release": "1.3", "sleep_config": {}}),
        ({"release": "1.4", "sleep_config": {}}, "sleep_config", "warning",
         {"release": "1.4", "sleep_config": {}, "kv_cache_config": {"use_kv_cache_manager_v2": False}}),
    ],
    "beams_stay_in_one_engine": [
        ({"split": True, "max_beam_width": 2}, "max_beam_width", "error", {"max_beam_width": 2}),
        ({"speculative_config": EAGLE, "max_beam_width": 2}, "max_beam_width", "error", {"speculative_config": EAGLE}),
        ({"backend": "_autodeploy", "max_beam_width": 2}, "max_beam_width", "error", {"backend": "_autodeploy"}),
    ],
    "adapters_are_untested_in_disaggregation": [
        ({"split": True, "enable_lora": True}, "enable_lora", "warning", {"enable_lora": True}),
    ],
    "autodeploy_takes_a_world_size_only": [
        ({"backend": "_autodeploy", "tensor_parallel_size": 2, "world_size": 4}, "world_size", "error",
         {"backend": "_autodeploy", "tensor_parallel_size": 4, "world_size": 4}),
        ({"backend": "_autodeploy", "stage": "multimodal_encoder"}, "backend", "error",
         {"stage": "multimodal_encoder"}),
    ],
    "only_living_backends": [({"backend": "tensorrt"}, "backend", "error", {"backend": "pytorch"})],
}  # fmt: skip
BY_NAME = {rule.__name__: rule for rule in RULES}
FLAT = [(name, *case) for name, cases in CASES.items() for case in cases]


def yaml_of(tree):
    tree = dict(tree)
    stage, release, is_split = tree.pop("stage", DECODE), tree.pop("release", "1.2"), tree.pop("split", False)
    return Yaml(tree, stage, release, tree.pop("model", ""), is_disaggregated=is_split)


def found_by(name, tree):
    return [(problem.key, problem.severity) for problem in BY_NAME[name](yaml_of(tree))]


def test_every_rule_is_in_force_and_has_a_case():
    assert BY_NAME.keys() == CASES.keys()


@pytest.mark.parametrize(("name", "bad", "key", "severity", "good"), FLAT, ids=lambda value: str(value)[:40])
def test_a_rule_finds_what_it_is_for(name, bad, key, severity, good):
    assert (key, severity) in found_by(name, bad)
    assert (key, severity) not in found_by(name, good)


def test_what_autodeploy_leaves_out_is_told_once_and_judged_by_no_other_rule():
    tree = {"backend": "_autodeploy", "tensor_parallel_size": 4, "moe_expert_parallel_size": 3, "world_size": 4}
    tree |= {"enable_attention_dp": True, "scheduler_config": {}, "max_batch_size": 64, "max_num_tokens": 32}
    found = [(problem.key, problem.severity) for problem in check_rules(yaml_of(tree))]
    left_out = ("scheduler_config", "moe_expert_parallel_size", "enable_attention_dp")
    assert found == [*((name, "warning") for name in left_out), ("max_batch_size", "error")]


def test_a_model_that_is_at_hand_tells_by_its_architecture_whatever_its_name(tmp_path):
    folder = tmp_path / "gpt-oss-120b"
    folder.mkdir()
    for architecture, expected in (("Qwen3ForCausalLM", False), ("LlamaForCausalLM", True)):
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert transceivers.is_python_by_model(str(folder), "1.4") is expected
    (folder / "config.json").write_text("not JSON")
    assert transceivers.is_python_by_model(str(folder), "1.4")


def test_an_empty_yaml_breaks_no_rule():
    assert check_rules(yaml_of({})) == []


def test_every_finding_has_a_reason_and_a_remedy():
    for name, bad, *_ in FLAT:
        for problem in BY_NAME[name](yaml_of(bad)):
            assert problem.reason and problem.remedy


@pytest.mark.parametrize(
    ("largest", "has_padding", "expected"),
    [
        (4, False, [1, 2, 3, 4]),
        (40, False, [*range(1, 33), 40]),
        (20, True, [1, 2, 4, 8, 16, 20]),
        (300, True, [1, 2, 4, *range(8, 129, 8), 256, 300]),
        (256, True, [1, 2, 4, *range(8, 129, 8), 256]),
    ],
)
def test_graph_sizes_are_made_as_tensorrt_llm_makes_them(largest, has_padding, expected):
    assert generated_graph_sizes(largest, has_padding=has_padding) == expected


# prefill and decode together


def recipe(prefill, decode, entries):
    workers = {}
    for stage, tree in ((PREFILL, prefill), (DECODE, decode)):
        own = {"disable_overlap_scheduler": True} if stage == PREFILL else {}
        tree = {"cache_transceiver_config": UCX} | own | tree
        workers[stage] = WorkerEntry(engine="trtllm", engine_config=EngineConfig(llm_args=tree), **entries[stage])
    return Recipe(model="m", workers=workers)


APART = {PREFILL: {"devices": (0,)}, DECODE: {"devices": (1,)}}


def findings(prefill, decode, entries=APART):
    return [problem.key for problem in pair_rules.check_recipe(recipe(prefill, decode, entries))]


def test_a_pair_that_agrees_is_good():
    assert findings({}, {}) == []


@pytest.mark.parametrize(
    ("prefill", "decode", "key"),
    [
        ({"kv_cache_config": {"tokens_per_block": 64}}, {}, "kv_cache_config.tokens_per_block"),
        ({"kv_cache_config": {"dtype": "fp8"}}, {}, "kv_cache_config.dtype"),
        ({}, {"kv_cache_config": {"max_attention_window": [512]}}, "kv_cache_config.max_attention_window"),
        ({}, {"cache_transceiver_config": UCX | {"backend": "NIXL"}}, "cache_transceiver_config.backend"),
        ({"speculative_config": {"decoding_type": "MTP"}}, {}, "speculative_config"),
        ({"max_seq_len": 4096}, {"max_seq_len": 4096}, "max_seq_len"),
    ],
)
def test_what_both_sides_need_alike_is_found_on_decode(prefill, decode, key):
    assert findings(prefill, decode) == [key]


def test_the_default_equals_what_is_written_out():
    assert findings({"kv_cache_config": {"tokens_per_block": 32, "dtype": "auto"}}, {}) == []


@pytest.mark.parametrize(
    ("sizes", "devices", "replicas", "is_good"),
    [
        ({"tensor_parallel_size": 2}, (1, 2), 1, True),
        ({"tensor_parallel_size": 2}, (1,), 1, False),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (1, 2, 3, 4), 1, True),
        ({}, (1, 2), 2, True),
        ({"tensor_parallel_size": 2}, (1, 2, 3), 2, False),
        ({"backend": "_autodeploy", "world_size": 2}, (1, 2), 1, True),
        ({"tensor_parallel_size": 2}, (1, 2), 0, True),  # another server has them
    ],
)
def test_devices_are_as_many_as_the_sizes_multiply_to(sizes, devices, replicas, is_good):
    entries = {PREFILL: {"devices": (0,)}, DECODE: {"devices": devices, "replicas": replicas}}
    assert ("devices" not in findings({}, sizes, entries)) == is_good


def test_two_engines_on_one_gpu_share_its_memory():
    same = {PREFILL: {"devices": (0,)}, DECODE: {"devices": (0,)}}
    half = {"kv_cache_config": {"free_gpu_memory_fraction": 0.4}}
    assert findings({}, {}, same) == ["kv_cache_config.free_gpu_memory_fraction"]
    assert findings(half, half, same) == []


def test_engines_that_name_no_gpus_take_the_same_ones():
    assert findings({}, {}, {PREFILL: {}, DECODE: {}}) == ["devices"]


def test_a_server_that_has_one_of_the_stages_has_its_gpus_alone():
    same = {PREFILL: {"devices": (0,), "replicas": 0}, DECODE: {"devices": (0,)}}
    assert findings({}, {}, same) == findings({}, {}, {PREFILL: {}, DECODE: {"replicas": 0}}) == []


def test_an_unknown_release_is_refused_and_a_known_one_decides():
    new = {"model_kwargs": {}}
    entry = WorkerEntry(engine="trtllm", engine_config=EngineConfig(llm_args=new), engine_version="1.3")
    assert pair_rules.check_worker(entry, DECODE, is_disaggregated=False) == []
    for version in ("2.0", "newest"):
        recipe = Recipe(model="m", workers={DECODE: WorkerEntry(engine="trtllm", engine_version=version)})
        (problem,) = pair_rules.check_recipe(recipe)
        assert problem.key == "engine_version" and problem.remedy == "set one of 1.2, 1.3, 1.4"
