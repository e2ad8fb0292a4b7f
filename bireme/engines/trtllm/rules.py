"""Rules across the fields of one engine YAML: what TensorRT-LLM accepts field by field and can't run, or runs badly.

Each rule gives its reason. An error fails or hangs; a warning works and hurts. Rules read the YAML after aliases are
resolved; the contract has reported blocks that are no mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bireme.engines.trtllm import draft_rules, kv_rules, parallel_rules
from bireme.engines.trtllm.engine_yaml import Yaml, is_int
from bireme.engines.trtllm.problems import Problem

Rule = Callable[[Yaml], Iterator[Problem]]
_BY_WORLD_SIZE = "is divided by world_size alone"
# What an engine YAML may have and AutoDeploy may not be given -> why; tensor_parallel_size becomes its world_size.
NOT_IN_AUTODEPLOY = {
    "build_config": "has none",
    "scheduler_config": "has a scheduler of its own, which takes no configuration",
    "pipeline_parallel_size": _BY_WORLD_SIZE,
    "context_parallel_size": _BY_WORLD_SIZE,
    "moe_cluster_parallel_size": _BY_WORLD_SIZE,
    "moe_tensor_parallel_size": _BY_WORLD_SIZE,
    "moe_expert_parallel_size": _BY_WORLD_SIZE,
    "enable_attention_dp": _BY_WORLD_SIZE,
    "cp_config": _BY_WORLD_SIZE,
}


def long_prompts_need_chunks(yaml: Yaml) -> Iterator[Problem]:
    tokens = yaml.number("max_num_tokens", 8192)
    longest = yaml.number("max_input_len") or yaml.number("max_seq_len")
    if yaml.prefills and longest and longest > tokens and not yaml.get("enable_chunked_prefill"):
        reason = f"prompts longer than {tokens} tokens are refused, though max_seq_len allows {longest}"
        remedy = f"set enable_chunked_prefill: true, or max_num_tokens: {longest}"
        yield yaml.problem("max_num_tokens", reason, remedy, is_warning=True)


def a_step_holds_the_whole_batch(yaml: Yaml) -> Iterator[Problem]:
    tokens, batch = yaml.number("max_num_tokens", 8192), yaml.number("max_batch_size", 1)
    if batch > tokens and not yaml.is_autodeploy:  # which refuses it
        reason = f"a step of max_num_tokens {tokens} holds no more than {tokens} sequences"
        yield yaml.problem("max_batch_size", reason, f"set max_num_tokens to {batch} or more", is_warning=True)


def prompts_find_room_beside_a_full_batch(yaml: Yaml) -> Iterator[Problem]:
    tokens, batch = yaml.number("max_num_tokens", 8192), yaml.number("max_batch_size", 1)
    decoding = batch * (yaml.draft_len + 1)
    if yaml.stage == "decode" and yaml.prefills and batch <= tokens <= decoding:
        reason = f"{batch} sequences that generate take {decoding} tokens a step, which leaves prompts none"
        remedy = f"set more than {decoding}: several thousand, so that a prompt takes few steps"
        yield yaml.problem("max_num_tokens", reason, remedy, is_warning=True)


def the_input_leaves_room_for_output(yaml: Yaml) -> Iterator[Problem]:
    longest, whole = yaml.number("max_input_len"), yaml.number("max_seq_len")
    if longest and whole and longest >= whole:
        reason = f"max_seq_len {whole} counts the generated tokens, too"
        yield yaml.problem("max_input_len", reason, f"set at most {whole - 1}")


def graph_sizes_are_said_once(yaml: Yaml) -> Iterator[Problem]:
    sizes, largest = yaml.get("cuda_graph_config.batch_sizes"), yaml.number("cuda_graph_config.max_batch_size")
    if not sizes or not largest:
        return
    if sorted(sizes) != generated_graph_sizes(largest, has_padding=bool(yaml.get("cuda_graph_config.enable_padding"))):
        reason = "beside batch_sizes, TensorRT-LLM refuses a maximum that stands for another list"
        yield yaml.problem("cuda_graph_config.max_batch_size", reason, "keep one of the two")


def generated_graph_sizes(largest: int, *, has_padding: bool) -> list[int]:
    """Return the batch sizes that TensorRT-LLM makes of a maximum."""
    sizes = [1, 2, 4, *range(8, 129, 8)] if has_padding else [*range(1, 33), 64, 128]
    power = 256
    while power < largest:
        sizes.append(power)
        power *= 2
    return [size for size in sizes if size < largest] + [largest]


def graphs_fit_the_batch(yaml: Yaml) -> Iterator[Problem]:
    batch = yaml.number("max_batch_size", 2048)
    sizes = [size for size in yaml.get("cuda_graph_config.batch_sizes", ()) if is_int(size)]
    largest = max(sizes, default=yaml.number("cuda_graph_config.max_batch_size", 0))
    key = "cuda_graph_config.batch_sizes" if sizes else "cuda_graph_config.max_batch_size"
    if largest > batch:
        reason = f"graphs above max_batch_size {batch} are never used"
        yield yaml.problem(key, reason, f"end at {batch}", is_warning=True)


def prefill_runs_without_overlap(yaml: Yaml) -> Iterator[Problem]:
    if yaml.stage == "prefill" and yaml.release < "1.3" and not yaml.get("disable_overlap_scheduler"):
        reason = "TensorRT-LLM 1.2 has no overlap scheduler on workers that only prefill"
        yield yaml.problem("disable_overlap_scheduler", reason, "set true")


def beams_stay_in_one_engine(yaml: Yaml) -> Iterator[Problem]:
    if yaml.number("max_beam_width", 1) == 1:
        return
    if yaml.is_disaggregated:
        yield yaml.problem("max_beam_width", "disaggregated serving has beam width 1", "set 1")
    elif yaml.get("speculative_config") or yaml.is_autodeploy:
        yield yaml.problem("max_beam_width", "no beam search with speculation or _autodeploy", "set 1")


def adapters_are_untested_in_disaggregation(yaml: Yaml) -> Iterator[Problem]:
    if yaml.is_disaggregated and (yaml.get("enable_lora") or yaml.get("lora_config")):
        reason = "TensorRT-LLM's feature matrix calls LoRA with disaggregated serving untested"
        key = "lora_config" if yaml.get("lora_config") else "enable_lora"
        yield yaml.problem(key, reason, "test it before you rely on it", is_warning=True)


def autodeploy_leaves_out(yaml: Yaml) -> Iterator[Problem]:
    for key, why in NOT_IN_AUTODEPLOY.items():
        if yaml.get(key) is not None:
            yield yaml.problem(key, f"backend _autodeploy {why}; it is left out", "remove it", is_warning=True)


def autodeploy_takes_a_world_size_only(yaml: Yaml) -> Iterator[Problem]:
    if not yaml.is_autodeploy:
        return
    size, own = yaml.number("tensor_parallel_size"), yaml.number("world_size")
    if size and own and size != own:
        yield yaml.problem("world_size", f"tensor_parallel_size says {size}", "keep one of the two")
    batch, tokens = yaml.number("max_batch_size"), yaml.number("max_num_tokens")
    if batch and tokens and batch > tokens:
        yield yaml.problem("max_batch_size", f"_autodeploy refuses more than max_num_tokens {tokens}", f"set {tokens}")
    if yaml.stage == "multimodal_encoder":
        yield yaml.problem("backend", "_autodeploy has no encoder of its own", "set pytorch")


def only_living_samplers(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("sampler_type") == "TRTLLMSampler" and yaml.release >= "1.3":
        remedy = 'remove it, or set engine_version: "1.2" in the worker\'s entry'
        yield yaml.problem("sampler_type", "TensorRT-LLM 1.3 has removed it", remedy)


def only_living_backends(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("backend") == "tensorrt":
        yield yaml.problem("backend", "TensorRT-LLM is removing it, and bireme doesn't drive it", "set pytorch")


RULES: tuple[Rule, ...] = (
    parallel_rules.moe_sizes_are_counts,
    parallel_rules.moe_sizes_fill_the_tensor_parallel_group,
    parallel_rules.pipeline_partition_has_a_part_for_each_stage,
    parallel_rules.attention_dp_options_need_attention_dp,
    parallel_rules.ray_options_need_ray,
    parallel_rules.helix_has_the_kv_cache_s_blocks,
    parallel_rules.expert_slots_divide_by_the_ranks,
    parallel_rules.expert_assignments_fill_the_slots,
    parallel_rules.expert_balancing_needs_expert_parallelism,
    parallel_rules.expert_balancing_needs_a_backend_that_has_it,
    parallel_rules.wide_expert_parallelism_needs_attention_dp,
    long_prompts_need_chunks,
    a_step_holds_the_whole_batch,
    prompts_find_room_beside_a_full_batch,
    the_input_leaves_room_for_output,
    graph_sizes_are_said_once,
    graphs_fit_the_batch,
    draft_rules.drafts_have_a_model,
    draft_rules.drafts_have_a_length,
    draft_rules.n_grams_have_a_size,
    draft_rules.schedules_of_drafts_begin_with_their_length,
    draft_rules.drafting_runs_on_this_backend,
    draft_rules.drafts_fit_a_step,
    draft_rules.eagle_reuses_no_blocks,
    kv_rules.windows_limit_reuse,
    kv_rules.events_need_reuse,
    kv_rules.the_host_tier_holds_reusable_blocks,
    kv_rules.block_managers_share_whole_blocks,
    prefill_runs_without_overlap,
    kv_rules.transfer_has_a_backend,
    kv_rules.transfer_has_a_buffer_for_the_longest_prompt,
    kv_rules.transceivers_speak_what_their_runtime_can,
    kv_rules.connectors_have_a_name_or_classes,
    kv_rules.native_events_leave_ours_empty,
    draft_rules.drafts_are_one_model,
    kv_rules.kv_cache_manager_v2_does_not_sleep,
    beams_stay_in_one_engine,
    adapters_are_untested_in_disaggregation,
    autodeploy_takes_a_world_size_only,
    only_living_backends,
    only_living_samplers,
)


def check_rules(yaml: Yaml) -> list[Problem]:
    """For AutoDeploy only those about dropped keys."""
    found = []
    if yaml.is_autodeploy:
        found, yaml = list(autodeploy_leaves_out(yaml)), yaml.without(NOT_IN_AUTODEPLOY)
    return found + [problem for rule in RULES for problem in rule(yaml)]
