"""What one engine can take, computed from its settings, the model and the memory; refusals name the key."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bireme.config import EngineConfig
from bireme.engines.torch.geometry import EngineLimits, LayerGeometry, LayerGroup
from bireme.engines.torch.weights.architectures import position_limit
from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines.torch")

_CPU_POOL_BYTES = 1 << 30
_BATCH_SIZE = 64
_NUM_TOKENS = 2048  # enough to keep a GPU busy; running streams stand still for a step of so many
_LOGPROB_ELEMENTS = 1 << 25  # logits kept at once for prompt log probabilities


def resolve_limits(config: EngineConfig, model_config: Any) -> EngineLimits:
    """Fill in unset values. Raises ConfigError naming key, value and remedy."""
    max_seq_len = _max_seq_len(config, model_config)
    max_num_tokens = _at_least_one("max_num_tokens", config.max_num_tokens, _NUM_TOKENS)
    max_batch_size = _at_least_one("max_batch_size", config.max_batch_size, min(_BATCH_SIZE, max_num_tokens))
    if max_num_tokens < max_batch_size:
        raise ConfigError(
            f"max_num_tokens: {max_num_tokens} is less than max_batch_size {max_batch_size}: a step could not take"
            " one token of each request; raise the one or lower the other"
        )
    scheduler, size = config.scheduler_config, config.kv_cache_config.tokens_per_block
    if size < 1:
        raise ConfigError(f"kv_cache_config.tokens_per_block: {size}; at least 1, e.g. 32")
    return EngineLimits(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        max_input_len=min(_at_least_one("max_input_len", config.max_input_len, max_seq_len - 1), max_seq_len - 1),
        tokens_per_block=size,
        enable_chunked_prefill=config.enable_chunked_prefill,
        may_preempt=scheduler.capacity_scheduler_policy == "MAX_UTILIZATION",
        max_logprob_rows=max(1, _LOGPROB_ELEMENTS // model_config.vocab_size),
        max_queue_size=_at_least_one("scheduler_config.max_queue_size", scheduler.max_queue_size, 1),
        max_queue_time_s=scheduler.max_queue_time_s,
        best_effort_share=scheduler.best_effort_share,
        overlaps=not config.disable_overlap_scheduler,
    )


def narrow_windows(
    geometry: Sequence[LayerGeometry], windows: Sequence[int] | None, longest: int
) -> list[LayerGeometry]:
    """Apply kv_cache_config.max_attention_window, a list repeated over the layers: the smaller window counts.

    An entry of the model's longest sequence or more (`longest`; 0: unknown) is no window, as in TensorRT-LLM.
    """
    if windows is None:
        return list(geometry)
    if not windows or any(window < 1 for window in windows):
        raise ConfigError(f"kv_cache_config.max_attention_window: {list(windows)}; one or more positive numbers")
    narrowed = []
    for index, layer in enumerate(geometry):
        window = windows[index % len(windows)]
        if longest and window >= longest:
            window = layer.window
        narrowed.append(dataclasses.replace(layer, window=min(layer.window or window, window)))
    return narrowed


def pool_sizes(
    config: EngineConfig, limits: EngineLimits, groups: Sequence[LayerGroup], available: int = _CPU_POOL_BYTES
) -> list[int]:
    """Return the number of blocks per group, in `available` bytes where kv_cache_config.max_tokens is not set.

    Layers without a window get as many tokens as there is memory for; layers with one at most twice what the largest
    batch can hold at once, so that something is left for reuse.
    """
    size = limits.tokens_per_block
    caps = [_window_cap(group.window, limits) for group in groups]
    if (tokens := config.kv_cache_config.max_tokens) is not None:
        if tokens < size:
            raise ConfigError(
                f"kv_cache_config.max_tokens: {tokens} is less than one block (tokens_per_block {size}); raise it"
            )
        return [min(tokens // size, cap) if cap else tokens // size for cap in caps]
    most = -(-limits.max_batch_size * limits.max_seq_len // size)
    sizes = _share([group.bytes_per_token * size for group in groups], caps, available, most)
    if min(sizes) < 1:
        raise ConfigError(
            f"{max(0, available) >> 20} MiB of memory for KV do not hold one block of every layer; free memory, raise"
            " kv_cache_config.free_gpu_memory_fraction, or set kv_cache_config.max_tokens"
        )
    return sizes


def tier_sizes(config: EngineConfig, groups: Sequence[LayerGroup]) -> list[tuple[int, ...]]:
    """Return, per group, the number of blocks in each tier below the device: none, host memory, or that and disk."""
    cache, size = config.kv_cache_config, config.kv_cache_config.tokens_per_block
    if cache.disk_cache_size and not cache.host_cache_size:
        raise ConfigError(
            f"kv_cache_config.disk_cache_size: {cache.disk_cache_size}; blocks get to disk through host memory, set"
            " host_cache_size as well"
        )
    if cache.disk_cache_size and not cache.disk_cache_path:
        raise ConfigError("kv_cache_config.disk_cache_path: not set; disk_cache_size needs a folder")
    if cache.host_cache_size and not cache.enable_block_reuse:
        raise ConfigError(
            f"kv_cache_config.host_cache_size: {cache.host_cache_size}; with enable_block_reuse: false no block is"
            " found again, remove the one or the other"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (cache.host_cache_size or 0) > memory:
        raise ConfigError(
            f"kv_cache_config.host_cache_size: {cache.host_cache_size}; this host has {memory} bytes of memory, ask for"
            " less"
        )
    block_bytes = [group.bytes_per_token * size for group in groups]
    tiers: list[list[int]] = []
    for key in ("host_cache_size", "disk_cache_size"):
        if not (budget := getattr(cache, key)):
            break
        # Every group has the same number of blocks: a prefix comes back only if each group has its part of it.
        count = budget // sum(block_bytes)
        if not count:
            raise ConfigError(
                f"kv_cache_config.{key}: {budget} bytes do not hold one block of every layer, {sum(block_bytes)} bytes;"
                " raise it, or set 0"
            )
        tiers.append([count] * len(groups))
    return [tuple(tier[group] for tier in tiers) for group in range(len(groups))]


def _window_cap(window: int, limits: EngineLimits) -> int:
    if not window:
        return 0
    size = limits.tokens_per_block
    a_request = (window + limits.max_num_tokens - 2) // size + 2
    decoding = (window - 1) // size + 2
    return 2 * (a_request + limits.max_batch_size * decoding)


def _share(block_bytes: Sequence[int], caps: Sequence[int], budget: int, most: int) -> list[int]:
    """Give every group the same number of blocks, at most its cap; the saved ones go to the others."""
    capped: dict[int, int] = {}
    while True:
        left = budget - sum(count * block_bytes[group] for group, count in capped.items())
        open_bytes = sum(size for group, size in enumerate(block_bytes) if group not in capped)
        even = min(most, left // open_bytes) if open_bytes else 0
        over = {group: cap for group, cap in enumerate(caps) if group not in capped and cap and cap < even}
        if not over:
            return [capped.get(group, even) for group in range(len(block_bytes))]
        capped |= over


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one GPU, once the model is loaded."""

    total: int
    free: int
    weights: int  # of this engine
    peak: int  # of a step of this engine, beyond weights and pools


def gpu_pool_bytes(memory: GpuMemory, fraction: float, neighbors: Sequence[float] = ()) -> int:
    """Return what the pools may take.

    `fraction` is of what weights and the largest step leave free. With engines beside it on the GPU (`neighbors`:
    their fractions), it is of the whole GPU, weights and largest step included, whoever starts first; fractions
    that come to more than 0.9 together are lowered to that in proportion.
    """
    free = memory.free - memory.peak
    if not neighbors:
        return int(free * fraction)
    part = fraction * min(1.0, 0.9 / (fraction + sum(neighbors)))
    return min(free, int(memory.total * part) - memory.weights - memory.peak)


def _max_seq_len(config: EngineConfig, model_config: Any) -> int:
    trained = int(getattr(model_config, "max_position_embeddings", 0) or 0)
    constant = position_limit(model_config)
    own = min(filter(None, (trained, constant)), default=0)
    asked = config.max_seq_len
    if asked is not None and asked < 2:
        raise ConfigError(f"max_seq_len: {asked}; at least 2, one prompt token and one generated")
    if not own:
        if asked is None:
            raise ConfigError("max_seq_len: not set, and config.json has no max_position_embeddings; set it")
        return asked
    if asked is not None and asked > own:
        why = "its rotary scaling is not constant beyond" if constant == own else "the model was made for"
        raise ConfigError(f"max_seq_len: {asked}; {why} {own} tokens; lower it to {own}")
    return asked or own


def _at_least_one(name: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise ConfigError(f"{name}: {value}; at least 1")
    return default if value is None else value


def check_kv_dtype(asked: str, dtype: torch.dtype) -> None:
    own = str(dtype).removeprefix("torch.")
    if asked not in ("auto", own):
        raise ConfigError(f"kv_cache_config.dtype: {asked}; the torch engine keeps KV in the model's {own}; use auto")
