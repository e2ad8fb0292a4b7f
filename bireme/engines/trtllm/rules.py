"""Rules across the fields of one engine YAML: what TensorRT-LLM accepts field by field and can't run, or runs badly.

Each rule gives its reason. An error fails or hangs; a warning works and hurts. Rules read the YAML after aliases are
resolved; the contract has reported blocks that are no mappings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bireme.engines.trtllm.problems import NOTHING, Problem
from bireme.engines.trtllm.transceivers import is_python_by_model

Tree = Mapping[str, Any]
Rule = Callable[["Yaml"], Iterator[Problem]]
_UNSET_SIZE = -1  # TensorRT-LLM's own
_DEFAULT_GRAPH_BATCH = 128
NO_DRAFTS = 0
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


class Yaml:
    """One worker's engine YAML with TensorRT-LLM's defaults where the rules need them."""

    def __init__(self, tree: Tree, stage: str, release: str, model: str = "", *, is_disaggregated: bool) -> None:
        self.tree = tree
        self.stage = stage
        self.release = release
        self.model = model  # a folder, or a name on the hub
        self.is_disaggregated = is_disaggregated

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at a dotted key; the default where it, or a block above it, is missing or null."""
        found: Any = self.tree
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    def number(self, key: str, default: Any = None) -> Any:
        """As `get`; what is no number counts as missing, so do infinity and NaN."""
        found = self.get(key)
        is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
        return found if is_number else default

    def block(self, key: str) -> Tree:
        found = self.get(key)
        return found if isinstance(found, Mapping) else {}

    def problem(self, key: str, reason: str, remedy: str, *, is_warning: bool = False) -> Problem:
        value = self.get(key, NOTHING)
        return Problem(tuple(key.split(".")), value, reason, remedy, "warning" if is_warning else "error")

    def without(self, keys: Iterable[str]) -> Yaml:
        tree = {key: value for key, value in self.tree.items() if key not in keys}
        return Yaml(tree, self.stage, self.release, self.model, is_disaggregated=self.is_disaggregated)

    @property
    def is_autodeploy(self) -> bool:
        return bool(self.get("backend") == "_autodeploy")

    @property
    def tensor_parallel_size(self) -> int:
        return int(self.number("tensor_parallel_size", 1))

    @property
    def world_size(self) -> int:
        if self.is_autodeploy:
            return int(self.number("world_size", self.tensor_parallel_size))
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        first, second, third = (int(self.number(name, 1)) for name in sizes)
        return first * second * third

    @property
    def prefills(self) -> bool:
        """Whether prompts are computed here: not on a decode worker that gets its KV from prefill."""
        return self.stage == "prefill" or not self.is_disaggregated

    @property
    def draft_len(self) -> int:
        """Draft tokens for each sure one."""
        if self.get("speculative_config.decoding_type") == "MTP":
            own = self.number("speculative_config.num_nextn_predict_layers")
            return int(own or self.number("speculative_config.max_draft_len", 1))
        return int(self.number("speculative_config.max_draft_len", NO_DRAFTS))

    @property
    def largest_graph_batch(self) -> int:
        """The largest batch that a CUDA graph will be captured for; 0: CUDA graphs are off."""
        if "cuda_graph_config" in self.tree and self.tree["cuda_graph_config"] is None:
            return 0
        sizes = [size for size in self.get("cuda_graph_config.batch_sizes", ()) if isinstance(size, int)]
        largest = max(sizes) if sizes else self.number("cuda_graph_config.max_batch_size") or _DEFAULT_GRAPH_BATCH
        return int(min(largest, self.number("max_batch_size", largest)))


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
    sizes = [size for size in yaml.get("cuda_graph_config.batch_sizes", ()) if _is_int(size)]
    largest = max(sizes, default=yaml.number("cuda_graph_config.max_batch_size", 0))
    key = "cuda_graph_config.batch_sizes" if sizes else "cuda_graph_config.max_batch_size"
    if largest > batch:
        reason = f"graphs above max_batch_size {batch} are never used"
        yield yaml.problem(key, reason, f"end at {batch}", is_warning=True)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def drafting_has_what_it_needs(yaml: Yaml) -> Iterator[Problem]:
    kind = yaml.get("speculative_config.decoding_type")
    model = yaml.get("speculative_config.speculative_model") or yaml.get("speculative_config.speculative_model_dir")
    if kind in ("Eagle", "Eagle3", "DraftTarget", "Draft_Target") and not model:
        yield yaml.problem("speculative_config.speculative_model", f"{kind} drafts with a model of its own", "name it")
    if kind in ("Eagle", "Eagle3", "NGram", "DraftTarget", "Draft_Target") and not yaml.draft_len:
        yield yaml.problem("speculative_config.max_draft_len", f"{kind} drafts that many tokens", "set 1 or more")
    if kind == "NGram" and yaml.release < "1.3" and not yaml.number("speculative_config.max_matching_ngram_size", 0):
        reason = "TensorRT-LLM 1.2 has 0 by default and does not start with it"
        yield yaml.problem("speculative_config.max_matching_ngram_size", reason, "set 1 or more")
    schedule = yaml.block("speculative_config.draft_len_schedule")
    if schedule and _by_number(schedule).get(1) != yaml.draft_len:
        reason = f"it begins with a batch of 1, at max_draft_len {yaml.draft_len}"
        yield yaml.problem("speculative_config.draft_len_schedule", reason, f"set 1: {yaml.draft_len} in it")


def _by_number(tree: Tree) -> dict[int, Any]:
    """JSON has only strings for keys."""
    return {int(key): value for key, value in tree.items() if str(key).isdecimal()}


def drafting_runs_on_this_backend(yaml: Yaml) -> Iterator[Problem]:
    kind = yaml.get("speculative_config.decoding_type")
    if kind in ("Lookahead", "Medusa"):
        reason = "only the TensorRT backend has it, which bireme doesn't drive"
        yield yaml.problem("speculative_config.decoding_type", reason, "use Eagle, MTP, NGram or DraftTarget")
    elif kind and yaml.number("pipeline_parallel_size", 1) > 1:
        reason = "speculative decoding does not work with pipeline parallelism"
        yield yaml.problem("pipeline_parallel_size", reason, "set 1 and raise tensor_parallel_size")


def drafts_are_one_model(yaml: Yaml) -> Iterator[Problem]:
    for name in ("eagle3_one_model", "mtp_eagle_one_model"):
        if yaml.get(f"speculative_config.{name}") is False and yaml.release >= "1.3":
            reason = "TensorRT-LLM 1.3 drafts in the target model's own steps alone, and refuses false"
            yield yaml.problem(f"speculative_config.{name}", reason, "remove it")


def drafts_fit_a_step(yaml: Yaml) -> Iterator[Problem]:
    if yaml.draft_len == NO_DRAFTS or not yaml.largest_graph_batch:
        return
    needed = yaml.largest_graph_batch * (yaml.draft_len + 1)
    if yaml.number("max_num_tokens", 8192) < needed:
        reason = f"the largest CUDA graph, {yaml.largest_graph_batch} sequences, takes {yaml.draft_len + 1} tokens each"
        yield yaml.problem("max_num_tokens", reason, f"set {needed} or more, or capture smaller graphs")


def eagle_reuses_no_blocks(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("speculative_config.decoding_type") not in ("Eagle", "Eagle3"):
        return
    if yaml.get("kv_cache_config.enable_block_reuse", True):
        reason = "every published Eagle configuration turns it off"
        key = "kv_cache_config.enable_block_reuse"
        yield yaml.problem(key, reason, "set false, or measure the acceptance with it", is_warning=True)


def windows_limit_reuse(yaml: Yaml) -> Iterator[Problem]:
    windows = [size for size in yaml.get("kv_cache_config.max_attention_window", ()) if _is_int(size)]
    longest = yaml.number("max_seq_len")
    if windows and longest and max(windows) < longest and yaml.get("kv_cache_config.enable_block_reuse", True):
        reason = f"no layer sees more than {max(windows)} of max_seq_len {longest} tokens: blocks that fall out of the"
        key, remedy = "kv_cache_config.max_attention_window", f"set a window of {longest}, or enable_block_reuse: false"
        yield yaml.problem(key, f"{reason} window can't be reused", remedy, is_warning=True)


def events_need_reuse(yaml: Yaml) -> Iterator[Problem]:
    if yaml.number("kv_cache_config.event_buffer_max_size", 0) > 0:
        if yaml.get("kv_cache_config.enable_block_reuse", True) is False:
            reason = "without enable_block_reuse there are no KV events"
            yield yaml.problem("kv_cache_config.event_buffer_max_size", reason, "set enable_block_reuse: true, or 0")


def the_host_tier_holds_reusable_blocks(yaml: Yaml) -> Iterator[Problem]:
    if yaml.number("kv_cache_config.host_cache_size", 0) > 0:
        if yaml.get("kv_cache_config.enable_block_reuse", True) is False:
            reason = "host memory keeps blocks for reuse, which is off"
            remedy = "set enable_block_reuse: true, or remove host_cache_size"
            yield yaml.problem("kv_cache_config.host_cache_size", reason, remedy, is_warning=True)


def block_managers_share_whole_blocks(yaml: Yaml) -> Iterator[Problem]:
    module = str(yaml.get("kv_connector_config.connector_module", ""))
    if not module.startswith("kvbm") and yaml.get("kv_connector_config.connector") != "kvbm":
        return
    if yaml.get("kv_cache_config.enable_partial_reuse", True):
        yield yaml.problem("kv_cache_config.enable_partial_reuse", "kvbm knows whole blocks only", "set false")
    if yaml.largest_graph_batch:
        reason = "kvbm's published configurations run without CUDA graphs: it hooks into the forward pass"
        yield yaml.problem("cuda_graph_config", reason, "set null, or test it with graphs", is_warning=True)


def prefill_runs_without_overlap(yaml: Yaml) -> Iterator[Problem]:
    if yaml.stage == "prefill" and yaml.release < "1.3" and not yaml.get("disable_overlap_scheduler"):
        reason = "TensorRT-LLM 1.2 has no overlap scheduler on workers that only prefill"
        yield yaml.problem("disable_overlap_scheduler", reason, "set true")


def transfer_has_a_backend_and_a_buffer(yaml: Yaml) -> Iterator[Problem]:
    if not yaml.is_disaggregated or yaml.stage not in ("prefill", "decode"):
        return
    if not yaml.get("cache_transceiver_config.backend"):
        reason = "without it the engine has no transceiver and every disaggregated request fails"
        yield yaml.problem("cache_transceiver_config.backend", reason, "set DEFAULT (NIXL) or UCX")
    buffer = yaml.number("cache_transceiver_config.max_tokens_in_buffer")
    longest = yaml.number("max_input_len") or yaml.number("max_seq_len")
    key = "cache_transceiver_config.max_tokens_in_buffer"
    if buffer is None:
        reason = "unset; a buffer smaller than the longest prompt ends in a deadlock under load"
        yield yaml.problem(key, reason, f"set {longest or 'the longest prompt'} or more", is_warning=True)
    elif longest and buffer < longest:
        reason = f"the longest prompt, {longest} tokens, does not fit: its transfer never ends and holds its blocks"
        yield yaml.problem(key, reason, f"set {longest} or more")


def transceivers_speak_what_their_runtime_can(yaml: Yaml) -> Iterator[Problem]:
    transceiver = yaml.block("cache_transceiver_config")
    if transceiver.get("backend") in (None, "DEFAULT", "NIXL"):
        return
    runtime, key = transceiver.get("transceiver_runtime", "auto"), "cache_transceiver_config.backend"
    if runtime == "PYTHON":
        reason = "the Python transceiver moves KV by NIXL alone"
        yield yaml.problem(key, reason, "set NIXL, or transceiver_runtime: CPP")
    elif runtime == "auto" and not yaml.is_autodeploy and is_python_by_model(yaml.model, yaml.release):
        reason = "this model asks for the Python transceiver, which moves KV by NIXL alone"
        remedy = "set DEFAULT, which every release takes, or transceiver_runtime: CPP beside it"
        yield yaml.problem(key, f"{reason}, and TensorRT-LLM {yaml.release} obeys it", remedy)


def connectors_have_a_name_or_classes(yaml: Yaml) -> Iterator[Problem]:
    connector = yaml.block("kv_connector_config")
    names = ("connector_module", "connector_scheduler_class", "connector_worker_class")
    if connector and connector.get("connector") is None and yaml.release >= "1.3":
        for name in names:
            if connector.get(name) is None:
                reason = "a connector is known by a name, or by its module and two classes"
                yield yaml.problem(f"kv_connector_config.{name}", reason, "set it, or connector: lmcache or kvbm")


def native_events_leave_ours_empty(yaml: Yaml) -> Iterator[Problem]:
    if yaml.get("kv_cache_config.kv_events_config.enable_kv_cache_events"):
        reason = "TensorRT-LLM sends its KV events itself then, by ZeroMQ, and bireme, which polls them, gets none"
        remedy = "remove it, and set kv_cache_config.event_buffer_max_size where the router is to know the blocks"
        yield yaml.problem("kv_cache_config.kv_events_config", reason, remedy, is_warning=True)


def kv_cache_manager_v2_does_not_sleep(yaml: Yaml) -> Iterator[Problem]:
    is_default = yaml.release >= "1.4"
    has_v2 = yaml.get("kv_cache_config.use_kv_cache_manager_v2", is_default) is True
    if yaml.get("sleep_config") is not None and has_v2:
        reason = "KV cache manager V2 can't give its memory back"
        remedy = "remove it, or set kv_cache_config.use_kv_cache_manager_v2: false"
        yield yaml.problem("sleep_config", reason, remedy, is_warning=True)


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
    moe_sizes_are_counts,
    moe_sizes_fill_the_tensor_parallel_group,
    pipeline_partition_has_a_part_for_each_stage,
    attention_dp_options_need_attention_dp,
    ray_options_need_ray,
    helix_has_the_kv_cache_s_blocks,
    expert_slots_divide_by_the_ranks,
    expert_assignments_fill_the_slots,
    expert_balancing_needs_expert_parallelism,
    expert_balancing_needs_a_backend_that_has_it,
    wide_expert_parallelism_needs_attention_dp,
    long_prompts_need_chunks,
    a_step_holds_the_whole_batch,
    prompts_find_room_beside_a_full_batch,
    the_input_leaves_room_for_output,
    graph_sizes_are_said_once,
    graphs_fit_the_batch,
    drafting_has_what_it_needs,
    drafting_runs_on_this_backend,
    drafts_fit_a_step,
    eagle_reuses_no_blocks,
    windows_limit_reuse,
    events_need_reuse,
    the_host_tier_holds_reusable_blocks,
    block_managers_share_whole_blocks,
    prefill_runs_without_overlap,
    transfer_has_a_backend_and_a_buffer,
    transceivers_speak_what_their_runtime_can,
    connectors_have_a_name_or_classes,
    native_events_leave_ours_empty,
    drafts_are_one_model,
    kv_cache_manager_v2_does_not_sleep,
    beams_stay_in_one_engine,
    adapters_are_untested_in_disaggregation,
    autodeploy_takes_a_world_size_only,
    only_living_backends,
    only_living_samplers,
)


def check_rules(yaml: Yaml) -> list[Problem]:
    """Return the findings; for AutoDeploy only those about dropped keys."""
    found = []
    if yaml.is_autodeploy:
        found, yaml = list(autodeploy_leaves_out(yaml)), yaml.without(NOT_IN_AUTODEPLOY)
    return found + [problem for rule in RULES for problem in rule(yaml)]
