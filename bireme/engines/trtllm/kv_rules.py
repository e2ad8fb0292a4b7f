"""Rules of an engine YAML about KV: reuse, tiers, events, connectors, and transfers between engines."""

from __future__ import annotations

from collections.abc import Iterator

from bireme.engines.trtllm.engine_yaml import Yaml, is_int
from bireme.engines.trtllm.problems import Problem
from bireme.engines.trtllm.transceivers import is_python_by_model


def windows_limit_reuse(yaml: Yaml) -> Iterator[Problem]:
    windows = [size for size in yaml.get("kv_cache_config.max_attention_window", ()) if is_int(size)]
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


def transfer_has_a_backend(yaml: Yaml) -> Iterator[Problem]:
    if yaml.hands_kv_over and not yaml.get("cache_transceiver_config.backend"):
        reason = "without it the engine has no transceiver and every disaggregated request fails"
        yield yaml.problem("cache_transceiver_config.backend", reason, "set DEFAULT (NIXL) or UCX")


def transfer_has_a_buffer_for_the_longest_prompt(yaml: Yaml) -> Iterator[Problem]:
    if not yaml.hands_kv_over:
        return
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
