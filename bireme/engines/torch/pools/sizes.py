"""How many blocks the pools and the tiers below them have; refusals name the key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bireme.config import EngineConfig, KvCacheConfig
from bireme.engines.torch.geometry import EngineLimits, LayerGroup
from bireme.errors import ConfigError

CPU_POOL_BYTES = 1 << 30


def pool_sizes(
    config: EngineConfig, limits: EngineLimits, groups: Sequence[LayerGroup], available: int = CPU_POOL_BYTES
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


def with_draft(groups: Sequence[LayerGroup], row_bytes: Sequence[int]) -> list[LayerGroup]:
    """Return what memory is counted by: a drafter's layers, of so many bytes each, lie beside the first group's."""
    first, *others = groups
    return [replace(first, row_bytes=(*first.row_bytes, *row_bytes)), *others]


def tier_sizes(config: EngineConfig, group_bytes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return, per group, the number of blocks in each tier below the device: none, host memory, or that and disk.

    `group_bytes`: what a block of each group takes. Every group has the same number: a prefix comes back only if each
    group has its part of it.
    """
    cache = config.kv_cache_config
    _check_tiers(cache)
    block_bytes = sum(group_bytes)
    counts: list[int] = []
    for key, budget in (("host_cache_size", cache.host_cache_size), ("disk_cache_size", cache.disk_cache_size)):
        if budget and budget < block_bytes:
            raise ConfigError(
                f"kv_cache_config.{key}: {budget} bytes do not hold one block of every layer, {block_bytes} bytes;"
                " raise it, or set 0"
            )
        counts += [budget // block_bytes] if budget else []
    return [tuple(counts)] * len(group_bytes)


def _check_tiers(cache: KvCacheConfig) -> None:
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


def _window_cap(window: int, limits: EngineLimits) -> int:
    if not window:
        return 0
    size = limits.tokens_per_block
    a_request = (window + limits.max_num_tokens - 2) // size + 2
    decoding = (window - 1) // size + 2
    return 2 * (a_request + limits.max_batch_size * decoding)


def _share(block_bytes: Sequence[int], caps: Sequence[int], budget: int, most: int) -> list[int]:
    """Give every group the same number of blocks, at most its cap (0: none); the saved ones go to the others."""
    counts = [0] * len(block_bytes)
    open_groups = set(range(len(block_bytes)))
    while open_groups:
        left = budget - sum(count * size for count, size in zip(counts, block_bytes, strict=True))
        even = min(most, left // sum(block_bytes[group] for group in open_groups))
        over = {group for group in open_groups if 0 < caps[group] < even}
        for group in over or open_groups:
            counts[group] = caps[group] if over else even
        open_groups -= over or open_groups
    return counts


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
