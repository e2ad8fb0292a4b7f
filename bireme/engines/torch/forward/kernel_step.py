"""Attention on a GPU: kernels that read the pools where they are. A length or a batch never seen before costs
nothing extra: no plan is made for its shape, nothing is padded to the longest row, no mask is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.engines.torch.forward.attention import Extras, store_rows
from bireme.engines.torch.kernels.packed_prefill import num_parts, packed_prefill
from bireme.engines.torch.kernels.paged_decode import paged_decode
from bireme.engines.torch.step import KernelGroup, PackedChunks


@dataclass(slots=True)
class KernelStep:
    """A forward pass over the pools: stores new keys and values, then attends."""

    keys: list[Tensor]  # per layer (pool rows, N * K)
    values: list[Tensor]  # per layer (pool rows, N * V)
    groups: list[KernelGroup]  # per layer: its group's
    block_size: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        group, keys, values = self.groups[layer], self.keys[layer], self.values[layer]
        store_rows(group.slots, key, keys)
        store_rows(group.slots, value, values)
        query_THK, key_TNK, value_TNV = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        parts = attend_stored(group, query_THK, key_TNK, value_TNV, keys, values, self.block_size, extras)
        return parts.unsqueeze(0)


def attend_stored(
    group: KernelGroup,
    query_THK: Tensor,
    key_TNK: Tensor,
    value_TNV: Tensor,
    keys: Tensor,
    values: Tensor,
    block_size: int,
    extras: Extras,
) -> Tensor:
    """Attend to a layer's pools, which have the step's keys and values already -> (T, H, V)."""
    num_kv, parts = key_TNK.shape[1], []
    if (view := group.decode) is not None:
        parts.append(
            paged_decode(
                query_THK[: len(view.lengths)],
                keys,
                values,
                view.blocks,
                view.lengths,
                block_size,
                num_kv,
                extras.scaling,
                group.window,
                extras.softcap,
                extras.sinks,
            )
        )
    for chunks in group.chunks:
        own = slice(chunks.begin, chunks.end)
        num_chunks, num_heads = len(chunks.query_begins) - 1, query_THK.shape[1]
        cut = num_parts(num_chunks, num_heads, chunks.longest_query, chunks.longest_key)
        if cut == 1 and not chunks.is_padded and _flash_takes(query_THK, value_TNV, extras):
            fresh = (key_TNK[own], value_TNV[own])
            parts.append(_flash(chunks, query_THK[own], *fresh, keys, values, group.window, extras.scaling))
        else:
            parts.append(
                packed_prefill(
                    query_THK[own],
                    keys,
                    values,
                    chunks.rows,
                    chunks.query_begins,
                    chunks.key_begins,
                    chunks.longest_query,
                    num_kv,
                    extras.scaling,
                    group.window,
                    extras.softcap,
                    extras.sinks,
                    cut,
                    chunks.is_padded,
                )
            )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _flash_takes(query: Tensor, value: Tensor, extras: Extras) -> bool:
    """What flash attention computes: 16-bit numbers, plain softmax, on Ampere and later."""
    size = query.shape[2]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and extras.softcap is None
        and extras.sinks is None
        and size == value.shape[2]
        and size % 8 == 0
        and size <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _flash(
    chunks: PackedChunks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int,
    scaling: float,
) -> Tensor:
    """Query, key and value are the chunks' own.

    A chunk behind its prefix is causal from the lower right corner: flash attention's own rule.
    """
    if not chunks.is_fresh:
        shape = len(chunks.rows), key.shape[1], -1
        key, value = (pool.index_select(0, chunks.rows).view(shape) for pool in (keys, values))
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        chunks.query_begins,
        chunks.key_begins,
        chunks.longest_query,
        chunks.longest_key,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )[0]
    return out
