"""What a decode step does between two matrix products, in one kernel: norms and rotary positions of queries and keys,
the new rows of the pools, attention over the block table.

Rows are cut into parts of about the same length, so that a long one does not keep a step waiting; the last part of a
row that is ready joins what all have found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.geometry import UNSCALED, KvScales, Rotary
from bireme.engines.torch.kernels.kept_rows import add_values, as_kept, halves_of_queries, no_sums, scores, whole_sums
from bireme.engines.torch.kernels.launch import chain, prefetch, start_next, wait
from bireme.engines.torch.kernels.paged_decode import precision, with_sinks
from bireme.engines.torch.kernels.rotary import rotated

_PROGRAMS = 256  # that an H100 or H200 runs at once
PART_COLUMNS = 7  # row, slot, position, first and last tile, number of the part, parts of the row (0: nothing to do)
Ints = npt.NDArray[np.int32]


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=["parts"])  # type: ignore[untyped-decorator]
def _attention_kernel(
    qkv,  # (R, (H + 2 N) K)
    q_norm,  # (K,)
    k_norm,
    cos_sin,
    parts,  # (parts, 7)
    table,  # (slots, columns) block ids
    keys,
    values,
    partial,  # (R, H, MOST_PARTS, K) float32
    weights,  # (R, H, MOST_PARTS) float32: logarithm of the sum of exp(score)
    counters,  # (R, N) zero, and zero again afterwards
    out,  # (R, H, K)
    sinks,  # (H,)
    scaling,
    softcap,
    eps,
    key_inverse,  # of the pools' scales
    value_inverse,
    value_scale,
    table_stride,
    window,
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAD_G: tl.constexpr,
    PAD_K: tl.constexpr,
    TILE: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_GPU: tl.constexpr,
    IS_ALONE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    kv_head, own_part = tl.program_id(0), parts + tl.program_id(1) * 7
    G: tl.constexpr = H // N
    g, k, t = tl.arange(0, PAD_G), tl.arange(0, PAD_K), tl.arange(0, TILE)
    used = tl.load(own_part + 6)
    row, slot = tl.load(own_part).to(tl.int64), tl.load(own_part + 1).to(tl.int64)
    position, number = tl.load(own_part + 2), tl.load(own_part + 5)
    begin, end = tl.load(own_part + 3), tl.load(own_part + 4)
    own_table = table + slot * table_stride
    first = tl.maximum(0, position + 1 - window)
    if CHAINED and used > 0:  # rows of earlier steps: they are there, whatever the kernel before still does
        at = begin * TILE + t
        block = tl.load(own_table + at // BLOCK_SIZE, (at >= first) & (at < position), 0)
        rows = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE) * N + kv_head
        prefetch(keys + rows * K, K * keys.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(values + rows * K, K * keys.dtype.element_ty.primitive_bitwidth // 8)
    wait(CHAINED, IS_ALONE)
    if used > 0:
        head = kv_head * G + g
        own = qkv + row * (H + 2 * N) * K
        angles = cos_sin + position.to(tl.int64) * K
        q = rotated(own + head * K, q_norm, angles, g < G, eps, K, PAD_K, HAS_NORM).to(qkv.dtype.element_ty)
        # The token's own key and value: loaded now by all parts, though one needs them, to have them when it does.
        at_key = own + (H + kv_head) * K + tl.zeros([1], tl.int32)
        new_key = rotated(at_key, k_norm, angles, tl.full([1], 1, tl.int1), eps, K, PAD_K, HAS_NORM)
        new_key = new_key.to(qkv.dtype.element_ty)
        new_value = tl.load(own + (H + N + kv_head) * K + k, k < K, 0.0)
        own_block = tl.load(own_table + position // BLOCK_SIZE).to(tl.int64)
        largest = tl.full([PAD_G], -1e30, tl.float32)
        total = tl.zeros([PAD_G], tl.float32)
        sums, odd_sums = no_sums(PAD_G, PAD_K, values, q)
        even_q, odd_q = halves_of_queries(q, keys)
        for tile in range(begin, end):
            at = tile * TILE + t
            is_seen = (at >= first) & (at < position)
            block = tl.load(own_table + at // BLOCK_SIZE, is_seen, 0)
            rows = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE) * N + kv_head
            score = scores(even_q, odd_q, keys, rows, is_seen, scaling, K, PAD_K, PRECISION, IS_GPU)
            if HAS_SOFTCAP:
                score = softcap * (2 / (1 + tl.exp(-2 * score / softcap)) - 1)  # tanh
            score = tl.where(is_seen[None, :], score, -1e30)
            new_largest = tl.maximum(largest, tl.max(score, 1))
            weight = tl.where(is_seen[None, :], tl.exp(score - new_largest[:, None]), 0.0)
            shrink = tl.exp(largest - new_largest)
            sums, odd_sums = add_values(
                sums, odd_sums, shrink, weight, q, values, rows, is_seen, K, PAD_K, PRECISION, IS_GPU
            )
            total = total * shrink + tl.sum(weight, 1)
            largest = new_largest
        sums = whole_sums(sums, odd_sums, values, q)
        start_next(CHAINED & IS_ALONE)
        if number == used - 1:  # the token itself
            kept_key, kept_value = as_kept(new_key, key_inverse, keys), as_kept(new_value, value_inverse, values)
            at_row = ((own_block * BLOCK_SIZE + position % BLOCK_SIZE) * N + kv_head) * K
            tl.store(keys + at_row + k[None, :], kept_key, (k < K)[None, :])
            tl.store(values + at_row + k, kept_value, k < K)
            own_score = tl.sum(q.to(tl.float32) * kept_key.to(tl.float32), 1) * scaling
            if HAS_SOFTCAP:
                own_score = softcap * (2 / (1 + tl.exp(-2 * own_score / softcap)) - 1)
            top = tl.maximum(largest, own_score)
            own_weight, own_shrink = tl.exp(own_score - top), tl.exp(largest - top)
            sums = sums * own_shrink[:, None] + own_weight[:, None] * kept_value.to(tl.float32)[None, :]
            total = total * own_shrink + own_weight
            largest = top
            largest, total, sums = with_sinks(sinks, head, g < G, largest, total, sums, HAS_SINKS)
        is_head = (g < G)[:, None] & (k < K)[None, :]
        to = out + (row * H + head[:, None]) * K + k[None, :]
        sums = sums / total[:, None] * value_scale
        if used == 1:
            tl.store(to, sums.to(out.dtype.element_ty), is_head)
        else:
            mine = (row * H + head) * MOST_PARTS + number
            tl.store(partial + mine[:, None] * K + k[None, :], sums, is_head)
            tl.store(weights + mine, largest + tl.log(total), g < G)
            tl.debug_barrier()  # all threads' stores come before the count
            if tl.atomic_add(counters + row * N + kv_head, 1) == used - 1:
                tl.store(counters + row * N + kv_head, 0)
                join_parts(
                    partial, weights, out, row * H + kv_head * G, used, G, K, PAD_HEADS, PAD_K, MOST_PARTS, AT_ONCE
                )


@triton.jit  # type: ignore[untyped-decorator]
def join_parts(
    partial,
    weights,
    out,
    first,
    used,
    G: tl.constexpr,
    K: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    PAD_K: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Store what the parts of G heads from `first` on make together.

    Elements of all heads side by side and several parts at once: each load is on its way before one is waited for.
    """
    SIZE: tl.constexpr = PAD_HEADS * PAD_K
    e, s = tl.arange(0, SIZE), tl.arange(0, AT_ONCE)
    k, head = e % PAD_K, e // PAD_K
    is_own = (head < G) & (k < K)
    partial += first * MOST_PARTS * K
    weights += first * MOST_PARTS
    top = tl.full([SIZE], -1e30, tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    sums = tl.zeros([SIZE], tl.float32)
    for begin in range(0, used, AT_ONCE):
        is_there = (begin + s < used)[:, None] & is_own[None, :]
        at = head[None, :] * MOST_PARTS + (begin + s)[:, None]
        weight = tl.load(weights + at, is_there, -1e30, cache_modifier=".cg")
        found = tl.load(partial + at * K + k[None, :], is_there, 0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(weight, 0))
        weight, shrink = tl.exp(weight - new_top[None, :]), tl.exp(top - new_top)
        sums = sums * shrink + tl.sum(found * weight, 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    tl.store(out + first * K + head * K + k, (sums / total).to(out.dtype.element_ty), is_own)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What programs of one row tell each other."""

    partial: Tensor  # (R, H, parts, K) float32
    weights: Tensor  # (R, H, parts) float32
    counters: Tensor  # (R, N) int32, zeros

    @classmethod
    def make(cls, rows: int, num_heads: int, num_kv_heads: int, size: int, device: torch.device) -> Scratch:
        parts = triton.next_power_of_2(most_parts(num_kv_heads))
        return cls(
            torch.empty(rows, num_heads, parts, size, device=device),
            torch.empty(rows, num_heads, parts, device=device),
            torch.zeros(rows, num_kv_heads, dtype=torch.int32, device=device),
        )


def most_parts(num_kv_heads: int) -> int:
    """Return into how many parts a row may be cut."""
    return min(64, max(16, _PROGRAMS // num_kv_heads))


def num_parts(rows: int, num_kv_heads: int) -> int:
    """Return how many parts there are of so many rows, whatever their lengths; programs without one cost time too."""
    most = most_parts(num_kv_heads)
    return max(most, rows + most // 2) if rows > 1 else most // 2


def num_stages(rows: int, dtype: torch.dtype) -> int:
    """Measured on an H200, 1,000 tokens a row and heads of 128: 3% at 32 rows, 10% at 64."""
    if dtype.itemsize > 2:
        return 2
    return 5 if 8 <= rows <= 32 else 3


def _resources(rows: int, dtype: torch.dtype, kept: torch.dtype, pad_k: int) -> dict[str, int | None]:
    """Return what a program is given; `kept`: the pools' dtype.

    With 128 registers a thread a multiprocessor has room for four programs. Of up to 8 rows joining takes more
    (`at_once`), and would spill.
    """
    has_most = rows > (8 if kept.itemsize == 1 else 32) and dtype.itemsize == 2 and pad_k <= 128
    return {"num_warps": 4, "num_stages": num_stages(rows, dtype), "maxnreg": 128 if has_most else None}


def at_once(rows: int, size: int) -> int:
    """Return how many parts are joined at once; registers for them take room from programs, of which few rows have
    few."""
    return max(1, min(16, (8192 if rows <= 8 else 2048 if rows <= 32 else 512) // size))


def tile_of(dtype: torch.dtype, size: int) -> int:
    return 64 if dtype.itemsize * max(16, triton.next_power_of_2(size)) <= 256 else 32


def cut_into_parts(slots: Ints, positions: Ints, count: int, most: int, window: int, tile: int) -> Ints:
    """Return (count, 7) for rows of one token each, long parts first; at most `most` parts a row, of equal length."""
    parts = np.zeros((count, PART_COLUMNS), dtype=np.int32)
    if not len(slots):
        return parts
    first = np.maximum(0, positions + 1 - window) // tile if window else np.zeros_like(positions)
    found = share_out(first, -(-positions // tile) - first, count, most)  # of the tokens before the row's own
    row = found[0]
    parts[: len(row)] = np.stack((row, slots[row], positions[row], *found[1:]), 1)
    return parts


def share_out(first: Ints, tiles: Ints, count: int, most: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Share rows' tiles, so many from the first on, out among at most `count` parts, and `most` a row.

    Return of each part, long ones first: its row, first and last tile, number, and how many the row has.
    """
    a_part = max(1, -(-int(tiles.sum()) // count), -(-int(tiles.max()) // most))
    while (used := np.maximum(1, -(-tiles // a_part))).sum() > count:
        a_part += 1 + a_part // 8
    row = np.repeat(np.arange(len(first)), used)
    number = np.arange(len(row)) - np.repeat(used.cumsum() - used, used)
    begin = first[row] + number * a_part
    end = np.minimum(begin + a_part, (first + tiles)[row])
    order = np.argsort(begin - end, kind="stable")
    return row[order], begin[order], end[order], number[order], used[row][order]


def decode_attention(
    qkv: Tensor,
    rotary: Rotary,
    parts: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    scratch: Scratch,
    block_size: int,
    num_heads: int,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    scales: KvScales = UNSCALED,
    is_alone: bool = False,
) -> Tensor:
    """qkv (R, (H + 2 N) K), parts of `cut_into_parts`, table (slots, columns) int32 -> (R, H K), of rows with parts.

    Window 0: all. Softcap 0: none. sinks (H,). `is_alone`: the next kernel starts late, `launch.wait` says why.
    """
    rows, size = len(qkv), rotary.cos_sin.shape[1]
    num_kv = keys.shape[1] // size
    if out is None:
        out = torch.empty(rows, num_heads * size, dtype=qkv.dtype, device=qkv.device)
    pad_k = max(32 if keys.dtype.itemsize == 1 else 16, triton.next_power_of_2(size))  # products are of 16 or more
    pad_heads = triton.next_power_of_2(num_heads // num_kv)
    _attention_kernel[(num_kv, len(parts))](
        qkv,
        qkv if rotary.q_norm is None else rotary.q_norm,
        qkv if rotary.k_norm is None else rotary.k_norm,
        rotary.cos_sin,
        parts,
        table,
        keys,
        values,
        scratch.partial,
        scratch.weights,
        scratch.counters,
        out,
        qkv if sinks is None else sinks,
        scaling * scales.keys,
        softcap or 1.0,
        rotary.eps,
        1 / scales.keys,
        1 / scales.values,
        scales.values,
        table.stride(0),
        window or 1 << 30,
        H=num_heads,
        N=num_kv,
        K=size,
        BLOCK_SIZE=block_size,
        PAD_G=max(16, pad_heads),
        PAD_K=pad_k,
        TILE=tile_of(qkv.dtype, size),
        MOST_PARTS=scratch.partial.shape[2],
        PAD_HEADS=pad_heads,
        AT_ONCE=at_once(rows, pad_heads * pad_k),
        HAS_NORM=rotary.q_norm is not None,
        HAS_SOFTCAP=softcap != 0,
        HAS_SINKS=sinks is not None,
        PRECISION=precision(qkv.dtype),
        IS_GPU=qkv.is_cuda,
        IS_ALONE=is_alone,
        **_resources(rows, qkv.dtype, keys.dtype, pad_k),
        **chain(qkv),
    )
    return out
