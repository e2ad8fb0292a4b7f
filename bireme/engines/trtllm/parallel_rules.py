"""Rules of an engine YAML about GPUs: how a model, its experts and its attention are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from bireme.engines.trtllm.engine_yaml import Yaml
from bireme.engines.trtllm.problems import Problem

_UNSET_SIZE = -1  # TensorRT-LLM's own


def moe_sizes_are_counts(yaml: Yaml) -> Iterator[Problem]:
    for key in ("moe_tensor_parallel_size", "moe_expert_parallel_size", "moe_cluster_parallel_size"):
        if yaml.number(key, 1) < 1 and yaml.get(key) != _UNSET_SIZE:
            yield yaml.problem(key, "it counts ranks", "set 1 or more, or remove it")


def moe_sizes_fill_the_tensor_parallel_group(yaml: Yaml) -> Iterator[Problem]:
    size = yaml.tensor_parallel_size
    tensor, expert = yaml.number("moe_tensor_parallel_size"), yaml.number("moe_expert_parallel_size")
    cluster = yaml.number("moe_cluster_parallel_size", 1)
    reason = f"the experts are spread over the {size} ranks of tensor_parallel_size"
    if tensor and expert and tensor * expert * cluster != size:
        text = f"{reason}: moe_tensor_parallel_size {tensor} * moe_expert_parallel_size {expert} * cluster {cluster}"
        yield yaml.problem("moe_tensor_parallel_size", f"{text} is {tensor * expert * cluster}", f"make it {size}")
    elif expert and cluster and size % (expert * cluster):
        remedy = f"set a divisor of {size}, or tensor_parallel_size: {expert}"
        yield yaml.problem("moe_expert_parallel_size", reason, remedy)


def pipeline_partition_has_a_part_for_each_stage(yaml: Yaml) -> Iterator[Problem]:
    parts, stages = yaml.get("pp_partition"), yaml.number("pipeline_parallel_size", 1)
    if isinstance(parts, list) and len(parts) != stages:
        reason = f"{len(parts)} parts for pipeline_parallel_size {stages}"
        yield yaml.problem("pp_partition", reason, "name the number of layers of each pipeline stage")


def attention_dp_options_need_attention_dp(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("enable_attention_dp"):
        return
    if yaml.get("enable_lm_head_tp_in_adp"):
        yield yaml.problem("enable_lm_head_tp_in_adp", "enable_attention_dp is off", "set enable_attention_dp: true")
    if yaml.get("attention_dp_config"):
        reason, remedy = "no effect while enable_attention_dp is off", "set enable_attention_dp: true, or remove it"
        yield yaml.problem("attention_dp_config", reason, remedy, is_warning=True)


def ray_options_need_ray(yaml: Yaml) -> Iterator[Problem]:
    for key in ("ray_worker_extension_cls", "ray_placement_config"):
        if yaml.get(key) is not None and yaml.get("orchestrator_type") != "ray":
            yield yaml.problem(key, "only orchestrator_type ray has it", "remove it, or set orchestrator_type: ray")


def helix_has_the_kv_cache_s_blocks(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("cp_config.cp_type") != "HELIX" or yaml.number("context_parallel_size", 1) == 1:
        return
    size, own = yaml.number("kv_cache_config.tokens_per_block", 32), yaml.number("cp_config.tokens_per_block")
    if own and own != size:
        reason = f"HELIX cuts sequences at blocks, and kv_cache_config.tokens_per_block is {size}"
        yield yaml.problem("cp_config.tokens_per_block", reason, f"set {size}")


def expert_slots_divide_by_the_ranks(yaml: Yaml) -> Iterator[Problem]:
    slots, ranks = yaml.number("moe_config.load_balancer.num_slots"), yaml.number("moe_expert_parallel_size", 1)
    if slots and ranks and slots % ranks:
        reason = f"every one of the {ranks} expert-parallel ranks holds the same number of slots"
        yield yaml.problem("moe_config.load_balancer.num_slots", reason, f"set a multiple of {ranks}")


def expert_assignments_fill_the_slots(yaml: Yaml) -> Iterator[Problem]:
    slots = yaml.number("moe_config.load_balancer.num_slots")
    for layer, experts in yaml.block("moe_config.load_balancer.initial_global_assignments").items():
        if slots and isinstance(experts, list) and len(experts) != slots:
            key = f"moe_config.load_balancer.initial_global_assignments.{layer}"
            reason = f"{len(experts)} experts for num_slots {slots}"
            yield Problem(tuple(key.split(".")), experts, reason, "name the expert of each slot")


def expert_balancing_needs_expert_parallelism(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("moe_config.load_balancer") is None or yaml.number("moe_expert_parallel_size", 1) > 1:
        return
    reason = "slots are balanced between expert-parallel ranks, and there is one"
    yield yaml.problem("moe_config.load_balancer", reason, "set moe_expert_parallel_size, or remove it")


def expert_balancing_needs_a_backend_that_has_it(yaml: Yaml) -> Iterator[Problem]:
    backend = yaml.get("moe_config.backend")
    if yaml.get("moe_config.load_balancer") is not None and backend in ("VANILLA", "TRITON", "MARLIN"):
        remedy = "set CUTEDSL, DEEPGEMM, TRTLLM or CUTLASS, or remove load_balancer"
        yield yaml.problem("moe_config.backend", "it has no load balancing", remedy)


def wide_expert_parallelism_needs_attention_dp(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("moe_config.backend") == "WIDEEP" and not yaml.get("enable_attention_dp"):
        reason = "WIDEEP exchanges tokens between data-parallel attention ranks"
        yield yaml.problem("moe_config.backend", reason, "set enable_attention_dp: true, or another backend")
