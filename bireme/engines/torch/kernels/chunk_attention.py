"""Attention of prompts' tokens in a step of any rows: which tokens follow each other is data, so one graph serves all.

Unlike packed_prefill it reads the block tables itself, and a program has all query heads of a KV head: few tokens fill
its tile.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.geometry import UNSCALED, KvScales
from bireme.engines.torch.kernels.kept_rows import as_computed
from bireme.engines.torch.kernels.paged_decode import precision, with_sinks

TILE_COLUMNS = 4  # first row, rows (0: nothing to do), slot, position of the first
_ROWS = 64  # of a tile's product: its tokens times the query heads of a KV head
Ints = npt.NDArray[np.int32]


@triton.jit  # type: ignore[untyped-decorator]
def over_tiles(
    q,  # (M, PAD_K) of tokens and heads
    keys,
    values,
    own_table,  # the sequence's block ids
    positions,  # (M,) of the rows' tokens
    length,  # of the sequence, its last token included
    begin,
    end,
    N,
    kv_head,
    scaling,
    softcap,
    window,
    K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAD_K: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_GPU: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the largest scores (M,), the sums of weights (M,) and of weighted values (M, PAD_K) of tiles of keys."""
    k, t = tl.arange(0, PAD_K), tl.arange(0, TILE)
    largest = tl.full([q.shape[0]], -1e30, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    sums = tl.zeros([q.shape[0], PAD_K], tl.float32)
    for tile in range(begin, end):
        at = tile * TILE + t
        is_there = at < length
        block = tl.load(own_table + at // BLOCK_SIZE, is_there, 0)
        rows = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE) * N + kv_head
        key = tl.load(keys + rows[None, :] * K + k[:, None], is_there[None, :] & (k < K)[:, None], 0.0)
        score = tl.dot(q, as_computed(key, q, IS_GPU), input_precision=PRECISION) * scaling
        if HAS_SOFTCAP:
            score = softcap * (2 / (1 + tl.exp(-2 * score / softcap)) - 1)  # tanh
        ahead = at[None, :] - positions[:, None]
        is_seen = (ahead <= 0) & (ahead > -window) & is_there[None, :]
        score = tl.where(is_seen, score, -1e30)
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.where(is_seen, tl.exp(score - new_largest[:, None]), 0.0)
        shrink = tl.exp(largest - new_largest)
        value = tl.load(values + rows[:, None] * K + k[None, :], is_there[:, None] & (k < K)[None, :], 0.0)
        value = as_computed(value, q, IS_GPU)
        sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        total = total * shrink + tl.sum(weight, 1)
        largest = new_largest
    return largest, total, sums


@triton.jit(do_not_specialize=["query_stride", "table_stride", "window"], do_not_specialize_on_alignment=["tiles"])  # type: ignore[untyped-decorator]
def _chunk_kernel(
    query,  # (R, ..., K), of which the first H heads
    keys,
    values,
    tiles,  # (tiles, 4)
    table,  # (slots, columns) block ids
    out,  # (R, H, K)
    sinks,  # (H,)
    scaling,
    value_scale,
    softcap,
    query_stride,
    table_stride,
    window,
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PAD_G: tl.constexpr,
    PAD_K: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_GPU: tl.constexpr,
):
    kv_head, own = tl.program_id(0), tiles + tl.program_id(1) * 4
    G: tl.constexpr = H // N
    count = tl.load(own + 1)
    if count > 0:
        m, k = tl.arange(0, TOKENS * PAD_G), tl.arange(0, PAD_K)
        token, g = m // PAD_G, m % PAD_G
        position = tl.load(own + 3)
        is_own = ((token < count) & (g < G))[:, None] & (k < K)[None, :]
        row, head = tl.load(own).to(tl.int64) + token, kv_head * G + g
        q = tl.load(query + row[:, None] * query_stride + head[:, None] * K + k[None, :], is_own, 0.0)
        own_table = table + tl.load(own + 2).to(tl.int64) * table_stride
        begin, end = tl.maximum(0, position + 1 - window) // TILE, tl.cdiv(position + count, TILE)
        largest, total, sums = over_tiles(
            q, keys, values, own_table, position + token, position + count, begin, end, N, kv_head, scaling, softcap,
            window, K, BLOCK_SIZE, PAD_K, TILE, HAS_SOFTCAP, PRECISION, IS_GPU,
        )  # fmt: skip
        largest, total, sums = with_sinks(sinks, head, g < G, largest, total, sums, HAS_SINKS)
        total = tl.where(token < count, total, 1.0)
        to = out + (row[:, None] * H + head[:, None]) * K + k[None, :]
        tl.store(to, (sums / total[:, None] * value_scale).to(out.dtype.element_ty), is_own)


def tile_tokens(num_heads: int, num_kv_heads: int) -> int:
    """Return how many tokens a tile has at most."""
    heads: int = triton.next_power_of_2(num_heads // num_kv_heads)
    return max(1, _ROWS // heads)


def cut_into_tiles(first_row: int, count: int, slot: int, position: int, tokens: int) -> Ints:
    """Return (tiles, 4) for `count` rows that follow each other from `position` on."""
    begins = np.arange(0, count, tokens, dtype=np.int32)
    lengths = np.minimum(tokens, count - begins)
    columns = (first_row + begins, lengths, np.full_like(begins, slot), position + begins)
    return np.stack(columns, 1, dtype=np.int32)


def chunk_attention(
    query: Tensor,
    tiles: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    block_size: int,
    num_heads: int,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scales: KvScales = UNSCALED,
) -> None:
    """Fill rows of `out` (R, H K) for query (R, H or more, K), tiles (tiles, 4) and table (slots, columns) int32.

    The rows' own keys and values are in the pools. Window 0: all. Softcap 0: none. sinks (H,).
    """
    size = query.shape[2]
    num_kv = keys.shape[1] // size
    pad_k, tokens = max(16, triton.next_power_of_2(size)), tile_tokens(num_heads, num_kv)
    _chunk_kernel[(num_kv, len(tiles))](
        query,
        keys,
        values,
        tiles,
        table,
        out,
        query if sinks is None else sinks,
        scaling * scales.keys,
        scales.values,
        softcap or 1.0,
        query.stride(0),
        table.stride(0),
        window or 1 << 30,
        H=num_heads,
        N=num_kv,
        K=size,
        BLOCK_SIZE=block_size,
        TOKENS=tokens,
        PAD_G=triton.next_power_of_2(num_heads // num_kv),
        PAD_K=pad_k,
        TILE=64 if query.dtype.itemsize * pad_k <= 256 else 32,
        HAS_SOFTCAP=softcap != 0,
        HAS_SINKS=sinks is not None,
        PRECISION=precision(query.dtype),
        IS_GPU=query.is_cuda,
        num_warps=4,
        num_stages=2,
    )
