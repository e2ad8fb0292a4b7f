"""What an engine does with each key of its YAML, by the rules that stand beside the keys in bireme/config.py.

One YAML drives every engine. A key that would change what is served, and that an engine can't do, is an
error with its reason; one that only affects speed elsewhere is named once in a log line. Only values other
than the default count.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from bireme.config import EngineConfig, WorkerEntry
from bireme.conversion import convert
from bireme.errors import ConfigError
from bireme.settings import DRAFT_MODELS, EAGLE, SYNTHETIC, Engines, Rule, SpeculativeConfig

logger = logging.getLogger("bireme.engines")
HONORED = Rule("honored")
EVENT_BUFFER = 100_000  # KV events that an engine keeps for its publisher


@functools.cache
def rules_of(engine: str, kind: type[msgspec.Struct] = EngineConfig, of_block: Rule = HONORED) -> dict[str, Rule]:
    """Return the engine's rule for every dotted key; `of_block` holds for keys that say nothing themselves."""
    rules: dict[str, Rule] = {}
    for field in msgspec.structs.fields(kind):
        beside = next((part for part in get_args(field.type) if isinstance(part, Engines)), None)
        rule = beside.rules.get(engine, of_block) if beside else of_block
        if isinstance(field.default, msgspec.Struct):
            block = rules_of(engine, type(field.default), rule)
            rules |= {f"{field.name}.{key}": inner for key, inner in block.items()}
        else:
            rules[field.name] = rule
    return rules


def check_engine_config(entry: WorkerEntry) -> tuple[str, ...]:
    """Raise ConfigError for what the entry's engine can't honor; log, once, and return the keys it ignores."""
    check_values(entry.engine_config)
    for key, value, reason in refusals(entry):
        raise ConfigError(f"{key}: {value!r} on engine {entry.engine}: {reason}")
    rules = rules_of(entry.engine)
    ignored = [key for key, _ in changed_keys(entry.engine_config) if rules[key].kind == "harmless"]
    if ignored:
        logger.info("engine_config_ignored engine=%s keys=%s", entry.engine, ",".join(ignored))
    return tuple(ignored)


def refusals(entry: WorkerEntry) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, value, reason with the remedy) of every setting that the entry's engine can't honor."""
    for key, value in changed_keys(entry.engine_config):
        rule = rules_of(entry.engine)[key]
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


def with_events(config: EngineConfig) -> EngineConfig:
    """Return the settings of an engine that records KV events: a buffer for them, where the YAML names none."""
    kv = config.kv_cache_config
    if kv.event_buffer_max_size or not kv.enable_block_reuse:
        return config
    arguments = config.llm_args
    if arguments:
        inner = arguments.get("kv_cache_config") or {}
        arguments = arguments | {"kv_cache_config": inner | {"event_buffer_max_size": EVENT_BUFFER}}
    kv = msgspec.structs.replace(kv, event_buffer_max_size=EVENT_BUFFER)
    return msgspec.structs.replace(config, kv_cache_config=kv, llm_args=arguments)


def check_values(config: EngineConfig) -> None:
    """Raise ConfigError for the first value that makes no sense on any engine, also in a config made by a program."""
    convert(msgspec.to_builtins(config), EngineConfig)
    if config.max_input_len and config.max_seq_len and config.max_input_len >= config.max_seq_len:
        raise ConfigError(
            f"max_input_len: {config.max_input_len}; max_seq_len {config.max_seq_len} counts the generated tokens"
            " as well, so at least one more"
        )
    if not config.llm_args and config.speculative_config is not None:  # TensorRT-LLM's YAML has checks of its own
        _check_drafts(config.speculative_config)
        _check_draft_model(config.speculative_config)
        _check_synthetic(config.speculative_config, config.load_format)


def _check_draft_model(config: SpeculativeConfig) -> None:
    key, kind, model = "speculative_config.speculative_model", config.decoding_type, config.speculative_model
    if kind in (*DRAFT_MODELS, *EAGLE) and not model:
        raise ConfigError(f"{key}: missing; {kind} drafts with a model, name its folder")
    if kind not in (*DRAFT_MODELS, *EAGLE) and model:
        raise ConfigError(
            f"{key}: {model!r}; {kind or 'this'} drafts without a model, remove it or set decoding_type:"
            f" {DRAFT_MODELS[-1]}"
        )


def _check_synthetic(config: SpeculativeConfig, load_format: str) -> None:
    key, is_synthetic = "speculative_config", config.decoding_type == SYNTHETIC
    if is_synthetic and load_format != "dummy":
        raise ConfigError(
            f"{key}.decoding_type: 'Synthetic' says which drafts are right, so that answers are not the model's: it is"
            f" for load_format: dummy, and that is {load_format!r}; set NGram, or that to dummy"
        )
    if is_synthetic and config.acceptance_rate is None:
        raise ConfigError(f"{key}.acceptance_rate: missing; set the share of drafted tokens that is right, e.g. 0.7")
    if not is_synthetic and config.acceptance_rate is not None:
        raise ConfigError(
            f"{key}.acceptance_rate: {config.acceptance_rate:g}; it is decoding_type: Synthetic's, others' drafts"
            " are as right as they are; remove it"
        )


def _check_drafts(config: SpeculativeConfig) -> None:
    key, most, schedule = "speculative_config", config.max_draft_len, config.draft_len_schedule
    if not config.decoding_type:
        if config != SpeculativeConfig():
            raise ConfigError(f"{key}.decoding_type: missing; set NGram, or remove {key}")
        return
    if most is None:
        raise ConfigError(f"{key}.max_draft_len: missing; set how many tokens a step verifies at the most, e.g. 6")
    if schedule is None:
        return
    if schedule.get(1) != most or min(schedule) < 1:
        raise ConfigError(
            f"{key}.draft_len_schedule: {schedule}; it maps numbers of sequences to lengths, and begins with"
            f" 1: {most}, which is max_draft_len"
        )
    if (longest := max(schedule.values())) > most:
        raise ConfigError(f"{key}.draft_len_schedule: {longest} is more than max_draft_len, {most}; raise that")
