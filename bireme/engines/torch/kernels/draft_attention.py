"""Attention of steps with drafts: the rows of a sequence, its last token and those of its draft, read its KV once.

Like decode_attention's, rows are cut into parts of about the same length, and the last part that is ready joins what
all have found. All rows' keys and values are in the pools before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.geometry import UNSCALED, KvScales
from bireme.engines.torch.kernels.chunk_attention import over_tiles
from bireme.engines.torch.kernels.decode_attention import (
    Ints,
    Scratch,
    at_once,
    join_parts,
    num_stages,
    share_out,
    tile_of,
)
from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.paged_decode import precision, with_sinks

# First row, slot, position, first and last tile, number of the part, parts of the run (0: nothing to do), second row,
# rows. The second row's successors follow it.
RUN_COLUMNS = 9
_MOST_TOKENS = 8  # rows of a program: more would take room from others


@triton.jit(do_not_specialize=["query_stride", "table_stride", "window"], do_not_specialize_on_alignment=["parts"])  # type: ignore[untyped-decorator]
def _draft_kernel(
    query,  # (R, ..., K), of which the first H heads
    parts,  # (parts, 9)
    table,  # (slots, columns) block ids
    keys,
    values,
    partial,  # (R, H, MOST_PARTS, K) float32
    weights,  # (R, H, MOST_PARTS) float32: logarithm of the sum of exp(score)
    counters,  # (R, N) zero, and zero again afterwards
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
    MOST_PARTS: tl.constexpr,
    PAD_HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_GPU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    kv_head, own = tl.program_id(0), parts + tl.program_id(1) * 9
    G: tl.constexpr = H // N
    used = tl.load(own + 6)
    wait(CHAINED)
    if used > 0:
        m, k = tl.arange(0, TOKENS * PAD_G), tl.arange(0, PAD_K)
        token, g = m // PAD_G, m % PAD_G
        first_row, position, number = tl.load(own), tl.load(own + 2), tl.load(own + 5)
        second_row, count = tl.load(own + 7), tl.load(own + 8)
        row, head = tl.where(token == 0, first_row, second_row + token - 1).to(tl.int64), kv_head * G + g
        is_own = (token < count) & (g < G)
        is_element = is_own[:, None] & (k < K)[None, :]
        q = tl.load(query + row[:, None] * query_stride + head[:, None] * K + k[None, :], is_element, 0.0)
        own_table = table + tl.load(own + 1).to(tl.int64) * table_stride
        largest, total, sums = over_tiles(
            q, keys, values, own_table, position + token, position + count, tl.load(own + 3), tl.load(own + 4), N,
            kv_head, scaling, softcap, window, K, BLOCK_SIZE, PAD_K, TILE, HAS_SOFTCAP, PRECISION, IS_GPU,
        )  # fmt: skip
        if number == used - 1:
            largest, total, sums = with_sinks(sinks, head, is_own, largest, total, sums, HAS_SINKS)
        has_seen = total > 0  # of a part some rows may see nothing
        total = tl.where(has_seen, total, 1.0)
        sums = sums / total[:, None] * value_scale
        if used == 1:
            to = out + (row * H + head)[:, None] * K + k[None, :]
            tl.store(to, sums.to(out.dtype.element_ty), is_element)
        else:
            mine = (row * H + head) * MOST_PARTS + number
            tl.store(partial + mine[:, None] * K + k[None, :], sums, is_element)
            tl.store(weights + mine, tl.where(has_seen, largest + tl.log(total), -1e30), is_own)
            tl.debug_barrier()  # all threads' stores come before the count
            counter = counters + first_row.to(tl.int64) * N + kv_head
            if tl.atomic_add(counter, 1) == used - 1:
                tl.store(counter, 0)
                for number_of_row in range(count):
                    joined = tl.where(number_of_row == 0, first_row, second_row + number_of_row - 1).to(tl.int64)
                    first = joined * H + kv_head * G
                    join_parts(partial, weights, out, first, used, G, K, PAD_HEADS, PAD_K, MOST_PARTS, AT_ONCE)


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows of sequences that read KV together, S of them: arrays (S,) int32."""

    first_rows: Ints
    second_rows: Ints  # and those that follow
    counts: Ints
    slots: Ints
    positions: Ints  # of the first rows; the others' follow

    @classmethod
    def of(cls, slots: Ints, positions: Ints, drafts: Ints, most: int) -> Runs:
        """`slots` and `positions` of S sequences, whose first rows are the step's first ones. A run has at most `most`
        rows. drafts (S, 2): where the rows of each one's draft begin, and how many there are.
        """
        begins, lengths = drafts.T
        parts = [np.stack([np.arange(len(slots)), begins, np.minimum(1 + lengths, most), slots, positions])]
        for done in range(most, 1 + int(lengths.max(initial=0)), most):
            rest = np.flatnonzero(1 + lengths > done)
            first = begins[rest] + done - 1
            counts = np.minimum(1 + lengths[rest] - done, most)
            parts.append(np.stack([first, first + 1, counts, slots[rest], positions[rest] + done]))
        return cls(*np.concatenate(parts, 1).astype(np.int32))


def most_tokens(max_draft_len: int) -> int:
    """Return the rows of a run at the most."""
    return min(_MOST_TOKENS, int(triton.next_power_of_2(1 + max_draft_len)))


def cut_runs(runs: Runs, count: int, most: int, window: int, tile: int) -> Ints:
    """Return (count, 9), long parts first; at most `most` parts a run, of equal length."""
    parts = np.zeros((count, RUN_COLUMNS), dtype=np.int32)
    if len(runs.slots):
        at = runs.positions
        first = np.maximum(0, at + 1 - window) // tile if window else np.zeros_like(at)
        found = share_out(first, -(-(at + runs.counts) // tile) - first, count, most)
        run = found[0]
        own = np.stack((runs.first_rows, runs.slots, at, runs.second_rows, runs.counts), 1)[run]
        used = parts[: len(run)]
        used[:, :3], used[:, 7:] = own[:, :3], own[:, 3:]
        for column, values in enumerate(found[1:], 3):
            used[:, column] = values
    return parts


def draft_attention(
    query: Tensor,
    parts: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    scratch: Scratch,
    out: Tensor,
    tokens: int,
    block_size: int,
    num_heads: int,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scales: KvScales = UNSCALED,
) -> None:
    """Fill rows of `out` (R, H K) for query (R, H or more, K), parts of `cut_runs`, table (slots, columns) int32.

    `tokens`: `most_tokens`. Window 0: all. Softcap 0: none. sinks (H,).
    """
    rows, size = len(query), query.shape[2]
    num_kv = keys.shape[1] // size
    pad_k, pad_heads = max(16, triton.next_power_of_2(size)), triton.next_power_of_2(num_heads // num_kv)
    is_small = query.dtype.itemsize == 2 and pad_k <= 128 and tokens * pad_heads <= 16
    _draft_kernel[(num_kv, len(parts))](
        query,
        parts,
        table,
        keys,
        values,
        scratch.partial,
        scratch.weights,
        scratch.counters,
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
        PAD_G=max(pad_heads, 16 // tokens),
        PAD_K=pad_k,
        TILE=tile_of(query.dtype, size),
        MOST_PARTS=scratch.partial.shape[2],
        PAD_HEADS=pad_heads,
        AT_ONCE=at_once(rows, pad_heads * pad_k),
        HAS_SOFTCAP=softcap != 0,
        HAS_SINKS=sinks is not None,
        PRECISION=precision(query.dtype),
        IS_GPU=query.is_cuda,
        num_warps=4,
        num_stages=num_stages(rows, query.dtype) if is_small else 2,
        maxnreg=128 if rows > 32 and is_small else None,
        **chain(query),
    )
