"""Attention on a GPU: kernels that read the pools where they are. A length or a batch never seen before costs
nothing extra: no plan is made for its shape, nothing is padded to the longest row, no mask is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.engines.torch.forward.attention import Extras, store_rows
from bireme.engines.torch.forward.flash_attention import FlashAttention
from bireme.engines.torch.geometry import UNSCALED, KvScales
from bireme.engines.torch.kernels.packed_prefill import num_parts, packed_prefill
from bireme.engines.torch.kernels.paged_decode import paged_decode
from bireme.engines.torch.step import KernelGroup


@dataclass(slots=True)
class KernelStep:
    """A forward pass over the pools: stores new keys and values, then attends."""

    keys: list[Tensor]  # per layer (pool rows, N * K)
    values: list[Tensor]  # per layer (pool rows, N * V)
    groups: list[KernelGroup]  # per layer: its group's
    block_size: int
    flash: FlashAttention
    scales: list[KvScales]  # per layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        group, keys, values, scales = self.groups[layer], self.keys[layer], self.values[layer], self.scales[layer]
        store_rows(group.slots, key, keys, scales.keys)
        store_rows(group.slots, value, values, scales.values)
        query_THK, key_TNK, value_TNV = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        pools = keys, values, self.block_size
        parts = attend_stored(group, query_THK, key_TNK, value_TNV, *pools, extras, self.flash, scales)
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
    flash: FlashAttention,
    scales: KvScales = UNSCALED,
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
                scales,
            )
        )
    for chunks in group.chunks:
        own = slice(chunks.begin, chunks.end)
        num_chunks, num_heads = len(chunks.query_begins) - 1, query_THK.shape[1]
        cut = num_parts(num_chunks, num_heads, chunks.longest_query, chunks.longest_key)
        found = None
        if cut == 1 and not chunks.is_padded:
            fresh = (key_TNK[own], value_TNV[own])
            found = flash.attend(chunks, query_THK[own], *fresh, keys, values, group.window, extras, scales)
        if found is None:
            found = packed_prefill(
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
                scales,
            )
        parts.append(found)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
