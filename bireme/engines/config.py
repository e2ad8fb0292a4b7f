"""Which keys of the engine YAML each engine honours, ignores without harm, or refuses.

One YAML drives every engine. A key that would change what is served, and that an engine can't do, is an
error with its reason; one that only affects speed elsewhere is named once in a log line. Only values other
than the default count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from bireme.config import EngineConfig, GuidedDecodingConfig, MockerConfig, MultimodalConfig, WorkerEntry
from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines")


@dataclass(frozen=True, slots=True)
class Rule:
    """What an engine does with a key."""

    kind: Literal["honoured", "harmless", "refused"]
    reason: str = ""  # of a refusal, with the remedy
    accepted: tuple[Any, ...] = ()  # values that a refused key may have all the same


HONOURED = Rule("honoured")
HARMLESS = Rule("harmless")


def _refused(reason: str, *accepted: Any) -> Rule:
    return Rule("refused", reason, accepted)


_ONE_GPU = "one GPU per engine; set 1 and use `replicas`, or engine: trtllm"
_NO_HOST_CACHE = "blocks are not offloaded to host memory; remove it, or use engine: trtllm"
_KV_MODEL_DTYPE = "the KV pool has the model's dtype; set auto, or use engine: trtllm"
UNREAD_EVENTS = "requests are placed in turns, whatever workers hold: nothing reads KV events, and they cost time"
UNREAD_EVENTS_REMEDY = "remove it"
_UNIFORM = (
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "max_input_len",
    "kv_cache_config.tokens_per_block",
    "kv_cache_config.enable_block_reuse",
    "kv_cache_config.max_tokens",
    "scheduler_config.capacity_scheduler_policy",
    "scheduler_config.max_queue_size",
    "scheduler_config.max_queue_time_s",
    "cache_transceiver_config.backend",
    "cache_transceiver_config.max_tokens_in_buffer",
    "cache_transceiver_config.kv_transfer_timeout_ms",
)
_LLM_ARGS = "TensorRT-LLM's arguments stand at the top of an engine YAML; move them there and set engine: trtllm"
_MOCKER = tuple(f"mocker.{name}" for name in MockerConfig.__struct_fields__)
_GUIDED = tuple(f"guided_decoding_config.{name}" for name in GuidedDecodingConfig.__struct_fields__)
_MULTIMODAL = tuple(f"multimodal_config.{name}" for name in MultimodalConfig.__struct_fields__)
_EVERY_ENGINE: dict[str, Rule] = dict.fromkeys(_UNIFORM, HONOURED)

TABLES: dict[str, dict[str, Rule]] = {
    "torch": _EVERY_ENGINE
    | dict.fromkeys(_MOCKER, HARMLESS)
    | dict.fromkeys((*_GUIDED, *_MULTIMODAL), HONOURED)
    | {
        "guided_decoding_backend": _refused("compiled with xgrammar here; set xgrammar", None, "xgrammar"),
        "scheduler_config.capacity_scheduler_policy": _refused(
            "new requests join a running batch here; set GUARANTEED_NO_EVICT", "GUARANTEED_NO_EVICT", "MAX_UTILIZATION"
        ),
        "dtype": HONOURED,
        "enable_chunked_prefill": HONOURED,
        "trust_remote_code": _refused("no code of a checkpoint is run; remove it, or use engine: trtllm"),
        "attn_backend": HARMLESS,
        "disable_overlap_scheduler": HARMLESS,
        "tensor_parallel_size": _refused(_ONE_GPU),
        "pipeline_parallel_size": _refused(_ONE_GPU),
        "kv_cache_config.free_gpu_memory_fraction": HONOURED,
        "kv_cache_config.max_attention_window": HONOURED,
        "kv_cache_config.event_buffer_max_size": _refused(f"{UNREAD_EVENTS}; {UNREAD_EVENTS_REMEDY}"),
        "kv_cache_config.dtype": _refused(_KV_MODEL_DTYPE, "float32", "float16", "bfloat16"),
        "kv_cache_config.enable_partial_reuse": HARMLESS,
        "kv_cache_config.host_cache_size": _refused(_NO_HOST_CACHE, 0),
        "llm_args": _refused(_LLM_ARGS),
    },
    "trtllm": _EVERY_ENGINE
    | dict.fromkeys((*_MOCKER, *_GUIDED, *_MULTIMODAL), HARMLESS)
    | dict.fromkeys(
        (
            "guided_decoding_backend",
            "dtype",
            "enable_chunked_prefill",
            "trust_remote_code",
            "attn_backend",
            "disable_overlap_scheduler",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "kv_cache_config.free_gpu_memory_fraction",
            "kv_cache_config.max_attention_window",
            "kv_cache_config.event_buffer_max_size",
            "kv_cache_config.dtype",
            "kv_cache_config.enable_partial_reuse",
            "kv_cache_config.host_cache_size",
            "llm_args",
        ),
        HONOURED,
    )
    | {
        "cache_transceiver_config.backend": _refused(
            "TensorRT-LLM moves KV itself and has no shm backend; set DEFAULT, NIXL, UCX, MPI or MOONCAKE",
            "DEFAULT",
            "NIXL",
            "UCX",
            "MPI",
            "MOONCAKE",
        )
    },
    "mocker": _EVERY_ENGINE
    | dict.fromkeys(_MOCKER, HONOURED)
    | dict.fromkeys((*_GUIDED, *_MULTIMODAL), HARMLESS)
    | dict.fromkeys(
        (
            "guided_decoding_backend",
            "dtype",
            "enable_chunked_prefill",
            "trust_remote_code",
            "attn_backend",
            "disable_overlap_scheduler",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "scheduler_config.capacity_scheduler_policy",
            "kv_cache_config.free_gpu_memory_fraction",
            "kv_cache_config.max_attention_window",
            "kv_cache_config.event_buffer_max_size",
            "kv_cache_config.dtype",
            "kv_cache_config.enable_partial_reuse",
            "kv_cache_config.host_cache_size",
        ),
        HARMLESS,
    )
    | {"llm_args": _refused(_LLM_ARGS)},
}

# Smallest value that makes sense; None (unset) always does.
_AT_LEAST: dict[str, float] = {
    "max_batch_size": 1,
    "max_num_tokens": 1,
    "max_seq_len": 2,
    "max_input_len": 1,
    "kv_cache_config.tokens_per_block": 1,
    "kv_cache_config.max_tokens": 1,
    "kv_cache_config.event_buffer_max_size": 0,
    "scheduler_config.max_queue_size": 1,
    "scheduler_config.max_queue_time_s": 0,
    "cache_transceiver_config.max_tokens_in_buffer": 1,
    "cache_transceiver_config.kv_transfer_timeout_ms": 1,
    "mocker.step_ms": 0,
    "mocker.step_ms_per_request": 0,
    "mocker.prefill_ms": 0,
    "mocker.prefill_ms_per_token": 0,
    "mocker.load_ms": 0,
    "mocker.vocab_size": 0,
    "mocker.max_seq_len": 2,
}


def check_engine_config(entry: WorkerEntry) -> tuple[str, ...]:
    """Raise ConfigError for what the entry's engine can't honour; log, once, and return the keys it ignores."""
    check_values(entry.engine_config)
    for key, value, reason in refusals(entry):
        raise ConfigError(f"{key}: {value!r} on engine {entry.engine}: {reason}")
    table = TABLES[entry.engine]
    ignored = [key for key, _ in changed_keys(entry.engine_config) if table[key].kind == "harmless"]
    if ignored:
        logger.info("engine_config_ignored engine=%s keys=%s", entry.engine, ",".join(ignored))
    return tuple(ignored)


def refusals(entry: WorkerEntry) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, value, reason with the remedy) of every setting that the entry's engine can't honour."""
    for key, value in changed_keys(entry.engine_config):
        rule = TABLES[entry.engine][key]
        if rule.kind == "refused" and value not in rule.accepted:
            yield key, value, rule.reason


def changed_keys(config: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every setting that is not the default."""
    default = type(config)()
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            yield from changed_keys(value, f"{prefix}{name}.")
        elif value != getattr(default, name):
            yield prefix + name, value


def all_keys(config: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every setting."""
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            yield from all_keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check_values(config: EngineConfig) -> None:
    """Raise ConfigError for the first value that makes no sense on any engine."""
    values = dict(all_keys(config))
    for key, least in _AT_LEAST.items():
        value = values[key]
        if value is not None and not value >= least:  # also NaN
            raise ConfigError(f"{key}: {value}; {least:g} or more")
    fraction = config.kv_cache_config.free_gpu_memory_fraction
    if not 0 < fraction <= 1:
        raise ConfigError(f"kv_cache_config.free_gpu_memory_fraction: {fraction}; more than 0, at most 1")
    if config.max_input_len and config.max_seq_len and config.max_input_len >= config.max_seq_len:
        raise ConfigError(
            f"max_input_len: {config.max_input_len}; max_seq_len {config.max_seq_len} counts the generated tokens"
            " as well, so at least one more"
        )
