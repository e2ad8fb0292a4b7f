"""Attention on a GPU: kernels that read the pools where they are. A length or a batch never seen before costs
nothing extra: no plan is made for its shape, nothing is padded to the longest row, no mask is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.engines.torch.attention import Extras, KernelGroup, PackedChunks, store_rows
from bireme.engines.torch.kernels.packed_prefill import packed_prefill
from bireme.engines.torch.kernels.paged_decode import paged_decode


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
        query_THK, num_kv, parts = query[0].transpose(0, 1), key.shape[1], []
        if (view := group.decode) is not None:
            parts.append(
                paged_decode(
                    query_THK[: len(view.lengths)],
                    keys,
                    values,
                    view.blocks,
                    view.lengths,
                    self.block_size,
                    num_kv,
                    extras.scaling,
                    group.window,
                    extras.softcap,
                    extras.sinks,
                )
            )
        for chunks in group.chunks:
            query_chunks = query_THK[chunks.begin : chunks.end]
            if _flash_takes(query, value, extras):
                parts.append(_flash(chunks, query_chunks, key, value, keys, values, group.window, extras.scaling))
            else:
                parts.append(
                    packed_prefill(
                        query_chunks,
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
                    )
                )
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def _flash_takes(query: Tensor, value: Tensor, extras: Extras) -> bool:
    """What flash attention computes: 16-bit numbers, plain softmax, on Ampere and later."""
    size = query.shape[3]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and extras.softcap is None
        and extras.sinks is None
        and size == value.shape[3]
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
    """A chunk behind its prefix is causal from the lower right corner: flash attention's own rule."""
    if chunks.is_fresh:
        own = slice(chunks.begin, chunks.end)
        key_LNK, value_LNV = key[0, :, own].transpose(0, 1), value[0, :, own].transpose(0, 1)
    else:
        shape = len(chunks.rows), key.shape[1], -1
        key_LNK, value_LNV = (pool.index_select(0, chunks.rows).view(shape) for pool in (keys, values))
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key_LNK,
        value_LNV,
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
