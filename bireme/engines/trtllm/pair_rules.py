"""Rules across the workers of one recipe: what prefill and decode must agree on, and how they share GPUs.

Each worker's YAML has passed rules.py by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from bireme.config import UNREAD_EVENTS, UNREAD_EVENTS_REMEDY, Recipe, WorkerEntry
from bireme.engines.trtllm.config import check_arguments, prepared
from bireme.engines.trtllm.contract import PROFILES, VERSIONS
from bireme.engines.trtllm.engine_yaml import Yaml
from bireme.engines.trtllm.problems import NOTHING, Problem

_FRACTION = "kv_cache_config.free_gpu_memory_fraction"
_GPUS_OF_A_NODE = 8  # where gpus_per_node does not say
_EQUAL: dict[str, tuple[object, str]] = {  # key -> TensorRT-LLM's default, why both sides need the same
    "kv_cache_config.tokens_per_block": (32, "blocks are transferred whole"),
    "kv_cache_config.dtype": ("auto", "transferred blocks are not converted"),
    "kv_cache_config.max_attention_window": (None, "each layer's blocks go to the same layer's pool"),
    "cache_transceiver_config.backend": (None, "both ends of a transfer speak one protocol"),
    "cache_transceiver_config.transceiver_runtime": (
        "auto",
        "the transceivers of both runtimes do not know each other",
    ),
}


def check_recipe(recipe: Recipe) -> list[Problem]:
    """Each problem has its worker's name. Without engine_version every release is checked."""
    entries = {stage: entry for stage, entry in recipe.workers.items() if entry.engine == "trtllm"}
    is_disaggregated = "prefill" in recipe.workers and "decode" in recipe.workers
    found = []
    for stage, entry in entries.items():
        found += _named(check_worker(entry, stage, recipe.model, is_disaggregated=is_disaggregated), stage)
        found += _named(list(_check_devices(entry, stage)), stage)
        if not recipe.publishes_events:
            found += _named(list(_check_events(entry, stage)), stage)
    if is_disaggregated and {"prefill", "decode"} <= entries.keys():
        found += _check_pair(entries["prefill"], entries["decode"])
        if all(entry.replicas for entry in entries.values()):  # else another server has the other stage
            found += _check_shared_devices(entries)
    return found + list(_check_pictures(recipe))


def _check_pictures(recipe: Recipe) -> Iterator[Problem]:
    """A worker that computes prompts must take what the encoder made."""
    stage = "prefill" if "prefill" in recipe.workers else "decode"
    entry = recipe.workers.get(stage)
    if "multimodal_encoder" not in recipe.workers or entry is None or entry.engine != "trtllm":
        return
    if entry.engine_config.llm_args.get("backend") == "_autodeploy":
        reason = "AutoDeploy takes no embeddings of an encoder: every picture would be refused"
        yield Problem(("backend",), "_autodeploy", reason, "remove it, or remove multimodal_encoder", worker=stage)


def check_worker(entry: WorkerEntry, stage: str, model: str = "", *, is_disaggregated: bool) -> list[Problem]:
    """For its release; for all of them where it names none."""
    if entry.engine_version and entry.engine_version not in PROFILES:
        reason = "not a release that bireme knows"
        return [Problem(("engine_version",), entry.engine_version, reason, f"set one of {', '.join(PROFILES)}")]
    found: dict[tuple[object, ...], Problem] = {}
    for release in (entry.engine_version,) if entry.engine_version else PROFILES:
        arguments = entry.engine_config.llm_args
        for problem in check_arguments(arguments, stage, VERSIONS[release], model, is_disaggregated=is_disaggregated):
            found.setdefault((problem.path, problem.severity), problem)
    return list(found.values())


def _named(found: list[Problem], stage: str) -> list[Problem]:
    return [replace(problem, worker=stage) for problem in found]


def yaml_of(entry: WorkerEntry, stage: str) -> Yaml:
    release = entry.engine_version if entry.engine_version in PROFILES else PROFILES[0]
    return Yaml(prepared(entry.engine_config.llm_args), stage, release, is_disaggregated=True)


def _check_pair(prefill: WorkerEntry, decode: WorkerEntry) -> list[Problem]:
    first, second = yaml_of(prefill, "prefill"), yaml_of(decode, "decode")
    found = [*_check_equal(first, second), *_check_lengths(first, second), *_check_drafts(first, second)]
    return _named(found, "decode")


def _check_equal(prefill: Yaml, decode: Yaml) -> Iterator[Problem]:
    for key, (default, reason) in _EQUAL.items():
        first, second = prefill.get(key, default), decode.get(key, default)
        if first != second:
            yield decode.problem(key, f"prefill has {first}; {reason}", f"set {first} on both sides")


def _check_lengths(prefill: Yaml, decode: Yaml) -> Iterator[Problem]:
    longest, whole = prefill.number("max_input_len") or prefill.number("max_seq_len"), decode.number("max_seq_len")
    if longest and whole and whole <= longest:
        reason = f"a prompt of {longest} tokens, which prefill takes, leaves no room for output"
        yield decode.problem("max_seq_len", reason, f"set more than {longest}, or lower prefill's", is_warning=True)


def _check_drafts(prefill: Yaml, decode: Yaml) -> Iterator[Problem]:
    kinds = [yaml.get("speculative_config.decoding_type") for yaml in (prefill, decode)]
    if kinds[0] != kinds[1]:
        reason = f"prefill has {kinds[0]}; the draft layers' KV is transferred with the rest"
        yield decode.problem("speculative_config", reason, "set the same speculative_config on both sides")


def _check_events(entry: WorkerEntry, stage: str) -> Iterator[Problem]:
    yaml = yaml_of(entry, stage)
    if yaml.number("kv_cache_config.event_buffer_max_size", 0) > 0:
        yield yaml.problem("kv_cache_config.event_buffer_max_size", UNREAD_EVENTS, UNREAD_EVENTS_REMEDY)


def _check_devices(entry: WorkerEntry, stage: str) -> Iterator[Problem]:
    needed = yaml_of(entry, stage).world_size
    if entry.devices and entry.replicas and len(entry.devices) != needed * entry.replicas:
        reason = f"{len(entry.devices)} GPUs for {entry.replicas} replica(s) of {needed}"
        remedy = f"name {needed * entry.replicas}, or leave it out where one engine spans nodes"
        yield Problem(("devices",), list(entry.devices), reason, remedy)


def _check_shared_devices(entries: Mapping[str, WorkerEntry]) -> list[Problem]:
    """Two engines on one GPU: each takes its fraction of what was free when it started."""
    first, second = entries["prefill"], entries["decode"]
    shared = set(first.devices) & set(second.devices)
    if not first.devices and not second.devices and not _spans_nodes(entries):
        reason = "prefill and decode both take the first GPUs of the machine"
        found = Problem(("devices",), NOTHING, reason, "name the GPUs of each", "warning", "decode")
        return [found]
    fractions = [yaml_of(entry, stage).number(_FRACTION, 0.9) for stage, entry in entries.items() if entry.devices]
    if not shared or sum(fractions) <= 1:
        return []
    reason = f"GPU {min(shared)} is shared, and the engines want {sum(fractions):.2f} of its free memory"
    remedy = "lower free_gpu_memory_fraction on both sides to 1 together, or give each its own devices"
    return [Problem(tuple(_FRACTION.split(".")), NOTHING, reason, remedy, "warning", "decode")]


def _spans_nodes(entries: Mapping[str, WorkerEntry]) -> bool:
    yamls = [yaml_of(entry, stage) for stage, entry in entries.items()]
    return any(yaml.world_size > yaml.number("gpus_per_node", _GPUS_OF_A_NODE) for yaml in yamls)
