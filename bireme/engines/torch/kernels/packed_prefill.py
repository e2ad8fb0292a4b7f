"""Causal attention of several prompts' chunks over the pool: each token sees its request's tokens up to itself.

For what flash attention does not do: float32, softcap, sinks, unusual head sizes, and few tokens behind many, such as a
question behind a long prefix: what they see is cut into parts, so that the whole GPU reads it. No mask is made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.geometry import UNSCALED, KvScales
from bireme.engines.torch.kernels.kept_rows import as_computed
from bireme.engines.torch.kernels.paged_decode import _padded, precision

_NOT_SPECIALIZED = ["window", "num_parts"]
_PROGRAMS = 256  # that an H100 or H200 runs at once
_MOST_PARTS = 16
_PART_KEYS = 256  # a part has no fewer


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)  # type: ignore[untyped-decorator]
def _prefill_kernel(
    query,  # (T, H, K)
    keys,
    values,
    rows,  # (L,) pool rows of what the chunks see, chunk after chunk
    query_begins,  # (chunks + 1,) into T
    key_begins,  # (chunks + 1,) into L
    sinks,  # (H,)
    out,  # (T, H, V)
    sums_of,  # (T, H, parts, V) float32, where there are parts
    marks_of,  # (T, H, parts, 2) float32: largest score, and the total of weights
    scaling,
    value_scale,
    softcap,
    query_stride,
    head_stride,
    window,
    num_parts,
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_V: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_GPU: tl.constexpr,
):
    chunk, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    tile_q, head = tl.program_id(1), tl.program_id(2)
    kv_head = head // (H // N)
    query_begin, query_end = tl.load(query_begins + chunk), tl.load(query_begins + chunk + 1)
    if query_begin + tile_q * TILE_Q < query_end:
        key_begin, key_end = tl.load(key_begins + chunk), tl.load(key_begins + chunk + 1)
        before = (key_end - key_begin) - (query_end - query_begin)  # tokens seen before the chunk's first
        i, k, v, t = tl.arange(0, TILE_Q), tl.arange(0, PAD_K), tl.arange(0, PAD_V), tl.arange(0, TILE)
        token = query_begin + tile_q * TILE_Q + i
        position = before + tile_q * TILE_Q + i
        is_own = token < query_end
        q = tl.load(
            query + token[:, None].to(tl.int64) * query_stride + head * head_stride + k[None, :],
            is_own[:, None] & (k < K)[None, :],
            0.0,
        )
        largest = tl.full([TILE_Q], -1e30, tl.float32)
        total = tl.zeros([TILE_Q], tl.float32)
        sums = tl.zeros([TILE_Q, PAD_V], tl.float32)
        begin = tl.maximum(0, before + tile_q * TILE_Q - window + 1) // TILE
        end = tl.cdiv(tl.minimum(key_end - key_begin, before + (tile_q + 1) * TILE_Q), TILE)
        if HAS_PARTS:
            size = tl.cdiv(end - begin, num_parts)
            begin += part * size
            end = tl.minimum(end, begin + size)
        for tile in range(begin, end):
            at = tile * TILE + t
            is_there = at < key_end - key_begin
            slot = tl.load(rows + key_begin + at, is_there, 0)
            key = tl.load(
                keys + (slot * N + kv_head)[None, :] * K + k[:, None], is_there[None, :] & (k < K)[:, None], 0.0
            )
            score = tl.dot(q, as_computed(key, q, IS_GPU), input_precision=PRECISION) * scaling
            if HAS_SOFTCAP:
                score = softcap * (2 / (1 + tl.exp(-2 * score / softcap)) - 1)  # tanh
            is_seen = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window)
            is_seen = is_seen & is_there[None, :]
            score = tl.where(is_seen, score, -1e30)
            new_largest = tl.maximum(largest, tl.max(score, 1))
            weight = tl.where(is_seen, tl.exp(score - new_largest[:, None]), 0.0)
            shrink = tl.exp(largest - new_largest)
            value = tl.load(
                values + (slot * N + kv_head)[:, None] * V + v[None, :], is_there[:, None] & (v < V)[None, :], 0.0
            )
            value = as_computed(value, q, IS_GPU)
            sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
            total = total * shrink + tl.sum(weight, 1)
            largest = new_largest
        sums *= value_scale
        if HAS_PARTS:
            at = (token.to(tl.int64) * H + head) * num_parts + part
            tl.store(sums_of + at[:, None] * V + v[None, :], sums, is_own[:, None] & (v < V)[None, :])
            tl.store(marks_of + at * 2, largest, is_own)
            tl.store(marks_of + at * 2 + 1, total, is_own)
        else:
            if HAS_SINKS:
                sink = tl.load(sinks + head).to(tl.float32)
                top = tl.maximum(largest, sink)
                sums = sums * tl.exp(largest - top)[:, None]
                total = total * tl.exp(largest - top) + tl.exp(sink - top)
            total = tl.where(is_own, total, 1.0)
            tl.store(
                out + (token[:, None].to(tl.int64) * H + head) * V + v[None, :],
                (sums / total[:, None]).to(out.dtype.element_ty),
                is_own[:, None] & (v < V)[None, :],
            )


@triton.jit(do_not_specialize=["num_parts", "num_chunks"])  # type: ignore[untyped-decorator]
def _join_kernel(
    sums_of,
    marks_of,
    query_begins,  # the last is where tokens of no chunk begin
    sinks,
    out,
    num_parts,
    num_chunks,
    H: tl.constexpr,
    V: tl.constexpr,
    PAD_V: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One token's head a program."""
    row = tl.program_id(0).to(tl.int64)
    part, v = tl.arange(0, MOST_PARTS), tl.arange(0, PAD_V)
    if row < tl.load(query_begins + num_chunks).to(tl.int64) * H:
        at, is_there = row * num_parts + part, part < num_parts
        largest = tl.load(marks_of + at * 2, is_there, -1e30)
        total = tl.load(marks_of + at * 2 + 1, is_there, 0.0)
        top = tl.max(largest, 0)
        if HAS_SINKS:
            sink = tl.load(sinks + row % H).to(tl.float32)
            top = tl.maximum(top, sink)
        share = tl.exp(largest - top)
        whole = tl.sum(total * share, 0)
        if HAS_SINKS:
            whole += tl.exp(sink - top)
        sums = tl.load(sums_of + at[:, None] * V + v[None, :], is_there[:, None] & (v < V)[None, :], 0.0)
        tl.store(out + row * V + v, (tl.sum(sums * share[:, None], 0) / whole).to(out.dtype.element_ty), v < V)


def num_parts(num_chunks: int, num_heads: int, longest_query: int, longest_key: int) -> int:
    """Return into how many parts what is seen is best cut; 1: the GPU has enough to do without."""
    programs: int = num_chunks * triton.cdiv(longest_query, 64) * num_heads
    return max(1, min(_PROGRAMS // programs, longest_key // _PART_KEYS, _MOST_PARTS))


def packed_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    query_begins: Tensor,
    key_begins: Tensor,
    longest_query: int,
    num_kv_heads: int,
    scaling: float,
    window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    parts: int = 1,
    is_padded: bool = False,
    scales: KvScales = UNSCALED,
) -> Tensor:
    """query (T, H, K), rows (L,) int64, begins (chunks + 1,) int32 -> (T, H, V). Window 0: all; parts: `num_parts`.

    Padded: tokens behind the last chunk's are zero.
    """
    tokens, heads, size = query.shape
    value_size = values.shape[1] // num_kv_heads
    pad_k, pad_v = _padded(size), _padded(value_size)
    make = torch.zeros if is_padded else torch.empty
    out = make(tokens, heads, value_size, dtype=query.dtype, device=query.device)
    sums = marks = out
    if parts > 1:
        sums = torch.empty(tokens, heads, parts, value_size, dtype=torch.float32, device=query.device)
        marks = torch.empty(tokens, heads, parts, 2, dtype=torch.float32, device=query.device)
    if query.stride(2) != 1:
        query = query.contiguous()
    is_small = query.dtype.itemsize * pad_k <= 256
    tile_q = 64 if is_small else 32
    num_chunks = len(query_begins) - 1
    _prefill_kernel[(num_chunks * parts, triton.cdiv(longest_query, tile_q), heads)](
        query,
        keys,
        values,
        rows,
        query_begins,
        key_begins,
        query if sinks is None else sinks,
        out,
        sums,
        marks,
        scaling * scales.keys,
        scales.values,
        softcap or 1.0,
        query.stride(0),
        query.stride(1),
        window or 1 << 30,
        parts,
        H=heads,
        N=num_kv_heads,
        K=size,
        V=value_size,
        PAD_K=pad_k,
        PAD_V=pad_v,
        TILE_Q=tile_q,
        TILE=64 if is_small else 32,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_PARTS=parts > 1,
        PRECISION=precision(query.dtype),
        IS_GPU=query.is_cuda,
        num_warps=4,
        num_stages=2,
    )
    if parts > 1:
        _join_kernel[(tokens * heads,)](
            sums,
            marks,
            query_begins,
            query if sinks is None else sinks,
            out,
            parts,
            num_chunks,
            H=heads,
            V=value_size,
            PAD_V=pad_v,
            MOST_PARTS=_MOST_PARTS,
            HAS_SINKS=sinks is not None,
            num_warps=1,
        )
    return out
