"""Attention of one token a row over its block table: nothing is gathered, padded or masked in memory.

A row's tokens are split among several programs (flash decoding); a second kernel joins what they found. So one
long row among short ones costs what its own tokens cost.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.geometry import UNSCALED, KvScales
from bireme.engines.torch.kernels.kept_rows import as_computed

_NOT_SPECIALIZED = ["table_stride", "num_splits", "window"]  # values that change while serving: one compilation


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)  # type: ignore[untyped-decorator]
def _split_kernel(
    query,  # (R, H, K)
    keys,
    values,
    table,  # (R, columns) block ids
    lengths,  # (R,) tokens that each row sees
    partial,  # (R, H, splits, V) float32: weighted sums
    stats,  # (R, H, splits, 2) float32: largest score, sum of weights
    scaling,
    softcap,
    query_stride,
    head_stride,
    table_stride,
    num_splits,
    window,
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAD_G: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_GPU: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // N
    length = tl.load(lengths + row)
    first = tl.maximum(0, length - window)
    first_tile = first // TILE
    num_tiles = tl.cdiv(length, TILE) - first_tile
    a_split = tl.cdiv(num_tiles, num_splits)
    begin = first_tile + split * a_split
    end = tl.minimum(first_tile + num_tiles, begin + a_split)
    g, k, v, t = tl.arange(0, PAD_G), tl.arange(0, PAD_K), tl.arange(0, PAD_V), tl.arange(0, TILE)
    head = kv_head * G + g
    q = tl.load(
        query + row.to(tl.int64) * query_stride + head[:, None] * head_stride + k[None, :],
        (g < G)[:, None] & (k < K)[None, :],
        0.0,
    )
    largest = tl.full([PAD_G], -1e30, tl.float32)
    total = tl.zeros([PAD_G], tl.float32)
    sums = tl.zeros([PAD_G, PAD_V], tl.float32)
    for tile in range(begin, end):
        at = tile * TILE + t
        is_seen = (at >= first) & (at < length)
        block = tl.load(table + row.to(tl.int64) * table_stride + at // BLOCK_SIZE, is_seen, 0)
        slot = block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        key = tl.load(keys + (slot * N + kv_head)[None, :] * K + k[:, None], is_seen[None, :] & (k < K)[:, None], 0.0)
        score = tl.dot(q, as_computed(key, q, IS_GPU), input_precision=PRECISION) * scaling
        if HAS_SOFTCAP:
            score = softcap * (2 / (1 + tl.exp(-2 * score / softcap)) - 1)  # tanh
        score = tl.where(is_seen[None, :], score, -1e30)
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.where(is_seen[None, :], tl.exp(score - new_largest[:, None]), 0.0)
        shrink = tl.exp(largest - new_largest)
        value = tl.load(
            values + (slot * N + kv_head)[:, None] * V + v[None, :], is_seen[:, None] & (v < V)[None, :], 0.0
        )
        value = as_computed(value, q, IS_GPU)
        sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        total = total * shrink + tl.sum(weight, 1)
        largest = new_largest
    at = (row.to(tl.int64) * H + head) * num_splits + split
    tl.store(partial + at[:, None] * V + v[None, :], sums, (g < G)[:, None] & (v < V)[None, :])
    tl.store(stats + at * 2, largest, g < G)
    tl.store(stats + at * 2 + 1, total, g < G)


@triton.jit  # type: ignore[untyped-decorator]
def _join_kernel(
    partial,
    stats,
    sinks,  # (H,)
    out,  # (R, H, V)
    value_scale,
    H: tl.constexpr,
    V: tl.constexpr,
    PAD_V: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    split, v = tl.arange(0, SPLITS), tl.arange(0, PAD_V)
    largest = tl.load(stats + (at * SPLITS + split) * 2)
    total = tl.load(stats + (at * SPLITS + split) * 2 + 1)
    top = tl.max(largest, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + at % H).to(tl.float32)
        top = tl.maximum(top, sink)
    weight = tl.exp(largest - top)
    divisor = tl.sum(total * weight, 0)
    if HAS_SINKS:
        divisor += tl.exp(sink - top)
    sums = tl.load(partial + (at * SPLITS + split)[:, None] * V + v[None, :], (v < V)[None, :], 0.0)
    tl.store(
        out + at * V + v, (tl.sum(sums * weight[:, None], 0) / divisor * value_scale).to(out.dtype.element_ty), v < V
    )


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    block_size: int,
    num_kv_heads: int,
    scaling: float,
    window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: KvScales = UNSCALED,
) -> Tensor:
    """query (R, H, K), table (R, columns) int32 and lengths (R,) int32 -> (R, H, V). Window 0: all."""
    rows, heads, size = query.shape
    value_size = values.shape[1] // num_kv_heads
    splits = num_splits(rows)
    pad_k, pad_v = _padded(size), _padded(value_size)
    partial = torch.empty(rows, heads, splits, value_size, dtype=torch.float32, device=query.device)
    stats = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, heads, value_size, dtype=query.dtype, device=query.device)
    if query.stride(2) != 1:
        query = query.contiguous()
    _split_kernel[(rows, num_kv_heads, splits)](
        query,
        keys,
        values,
        table,
        lengths,
        partial,
        stats,
        scaling * scales.keys,
        softcap or 1.0,
        query.stride(0),
        query.stride(1),
        table.stride(0),
        splits,
        window or 1 << 30,
        H=heads,
        N=num_kv_heads,
        K=size,
        V=value_size,
        BLOCK_SIZE=block_size,
        PAD_G=max(16, triton.next_power_of_2(heads // num_kv_heads)),
        PAD_K=pad_k,
        PAD_V=pad_v,
        TILE=_tile(query.dtype, pad_k),
        HAS_SOFTCAP=softcap is not None,
        PRECISION=precision(query.dtype),
        IS_GPU=query.is_cuda,
        num_warps=4,
        num_stages=3 if query.dtype.itemsize == 2 and pad_k <= 128 else 2,
    )
    _join_kernel[(rows * heads,)](
        partial,
        stats,
        stats if sinks is None else sinks,
        out,
        scales.values,
        H=heads,
        V=value_size,
        PAD_V=pad_v,
        SPLITS=splits,
        HAS_SINKS=sinks is not None,
        num_warps=2,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def with_sinks(sinks, head, is_head, largest, total, sums, HAS_SINKS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return largest score, total and sums of heads' rows whose weights a sink has a share of."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, is_head, -1e30).to(tl.float32)
        top = tl.maximum(largest, sink)
        shrink = tl.exp(largest - top)
        return top, total * shrink + tl.exp(sink - top), sums * shrink[:, None]
    return largest, total, sums


def num_splits(rows: int) -> int:
    """Return how many programs share a row, whatever its length: a graph keeps its grid."""
    return 32 if rows <= 2 else 16 if rows <= 8 else 8 if rows <= 32 else 4


def precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"  # tf32 has no meaning, and no effect, for 16-bit operands


def _padded(size: int) -> int:
    padded: Any = triton.next_power_of_2(size)
    return max(16, int(padded))


def _tile(dtype: torch.dtype, pad_k: int) -> int:
    return 64 if dtype.itemsize * pad_k <= 256 else 32
