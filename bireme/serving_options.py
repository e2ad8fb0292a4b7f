"""How a request is to be served, beside its prompt and sampling: options that ride along from the entry to router and
engine.

Every form of a request holds the same `ServingOptions`, so none of them copies a field. Here are also the readers of
their tensors, and the checks of entry and engine; `pipelines/extensions.py` has their names in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from bireme.config import RoutingMode
from bireme.errors import RequestError
from bireme.parameters import MAX_INT32

MAX_SESSION_CHARACTERS = 256
MAX_SALT_CHARACTERS = 1024  # no key: a salt separates prompts as well by its digest
MAX_RETENTION_RANGES = 64
_T = TypeVar("_T", bound=msgspec.Struct)


class RoutingChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a request says about its own placement; unset: the router decides."""

    mode: RoutingMode | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    prefill_dp_rank: int | None = None
    decode_dp_rank: int | None = None
    generation: int | None = None  # begins there where it can, whatever the weights say
    query_only: bool = False  # answer with the placement, and compute nothing


NO_CHOICE = RoutingChoice()


class TokenRangeRetention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the KV blocks of prompt tokens [token_start, token_end) are kept. TensorRT-LLM's names."""

    token_start: int
    token_end: int | None = None  # None: the prompt's end
    priority: int  # 0 to 100, higher is kept longer; 35 is usual
    duration_ms: int | None = None  # from the last use on, then it is kept as usual; None: for good


class KvCacheRetentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long a request's KV blocks are kept for others, in comparison with those of other requests."""

    token_range_retention_configs: tuple[TokenRangeRetention, ...] = ()  # they do not overlap
    decode_retention_priority: int = 35  # of blocks that begin with generated tokens
    decode_duration_ms: int | None = None


class ServingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    cache_salt: str = ""  # prompts with different salts share no KV blocks
    lora_name: str = ""
    priority: float = 0.5  # 0..1, higher first
    session_id: str = ""  # requests of one session stay with their worker
    routing: RoutingChoice = NO_CHOICE
    kv_cache_retention_config: KvCacheRetentionConfig | None = None  # None: its blocks are kept as usual


NO_OPTIONS = ServingOptions()


def read_options(values: Mapping[str, Any], priority: float, lora_name: str) -> ServingOptions:
    """Return the options that stand in tensors, beside those read with the sampling values. Raises RequestError."""
    return ServingOptions(
        cache_salt=values.get("cache_salt", ""),
        lora_name=lora_name,
        priority=priority,
        session_id=check_session(values.get("session_id", "")),
        routing=_parse_routing(values.get("routing", "")),
        kv_cache_retention_config=parse_retention(values.get("kv_cache_retention_config", "")),
    )


def check_options(options: ServingOptions) -> None:
    """Check what an engine is sent. Raises RequestError."""
    if not (math.isfinite(options.priority) and 0 <= options.priority <= 1):
        raise RequestError(f"priority: {options.priority}; 0 to 1, higher first")
    if len(options.cache_salt) > MAX_SALT_CHARACTERS:
        raise RequestError(
            f"cache_salt: {len(options.cache_salt)} characters; the limit is {MAX_SALT_CHARACTERS}; send a digest"
        )
    check_retention(options.kv_cache_retention_config)


def check_session(session_id: str, where: str = "session_id") -> str:
    if len(session_id) > MAX_SESSION_CHARACTERS:
        raise RequestError(f"{where}: {len(session_id)} characters; the limit is {MAX_SESSION_CHARACTERS}, shorten it")
    return session_id


def _parse_routing(text: str) -> RoutingChoice:
    if not text:
        return NO_CHOICE
    choice = _parse(text, RoutingChoice, "routing")
    if choice.query_only:
        raise RequestError("routing.query_only: the model `router` (router.has_model) answers that, remove it")
    return choice


def parse_retention(text: str) -> KvCacheRetentionConfig | None:
    """Read the tensor `kv_cache_retention_config`. Raises RequestError."""
    return check_retention(_parse(text, KvCacheRetentionConfig, "kv_cache_retention_config")) if text else None


def _parse(text: str, kind: type[_T], name: str) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        fields = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise RequestError(f"{name}: {str(error)[:200]}; send a JSON object with {fields}") from None


def check_retention(
    config: KvCacheRetentionConfig | None, where: str = "kv_cache_retention_config"
) -> KvCacheRetentionConfig | None:
    """Return what is given. Raises RequestError for what no cache can do."""
    if config is None:
        return None
    ranges = config.token_range_retention_configs
    if len(ranges) > MAX_RETENTION_RANGES:
        raise RequestError(
            f"{where}.token_range_retention_configs: {len(ranges)} ranges; the limit is {MAX_RETENTION_RANGES}"
        )
    levels: list[tuple[str, int, str, int | None]] = []
    for at, one in enumerate(ranges):
        name = f"{where}.token_range_retention_configs[{at}]"
        if one.token_start < 0 or (one.token_end is not None and one.token_end <= one.token_start):
            raise RequestError(
                f"{name}: tokens {one.token_start} to {one.token_end}; token_start is 0 or more, token_end is"
                " behind it, or null for the prompt's end"
            )
        levels.append((f"{name}.priority", one.priority, f"{name}.duration_ms", one.duration_ms))
    levels.append((
        f"{where}.decode_retention_priority", config.decode_retention_priority,
        f"{where}.decode_duration_ms", config.decode_duration_ms,
    ))  # fmt: skip
    for priority_name, priority, duration_name, duration_ms in levels:
        if not 0 <= priority <= 100:
            raise RequestError(f"{priority_name}: {priority}; 0 to 100, higher is kept longer")
        if duration_ms is not None and not 1 <= duration_ms <= MAX_INT32:
            raise RequestError(f"{duration_name}: {duration_ms}; 1 to {MAX_INT32} milliseconds, or null for good")
    for before, after in pairwise(sorted(ranges, key=lambda one: one.token_start)):
        if before.token_end is None or before.token_end > after.token_start:
            raise RequestError(
                f"{where}.token_range_retention_configs: the ranges from tokens {before.token_start} and"
                f" {after.token_start} overlap; end the first before the second begins"
            )
    return config
