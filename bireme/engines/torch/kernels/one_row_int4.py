"""`one_row_linear` for weights of 4-bit integers, whose order `int4_linear` tells of.

A program has 16 rows of weights and all of their inputs. Its warps take turns with blocks of PACKED inputs: what a
warp loads it multiplies itself, by a tensor core, as one product of a batch of them. The sums are added up last.
So nothing goes through shared memory but the row, and no program waits for another one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.int4_linear import joined, planes
from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.tiles import result_of, store_result, stored_how
from bireme.engines.torch.storage import PACKED, Int4Weight

ROWS = tl.constexpr(16)  # of weights, in a program: a tensor core's product has so many
COLUMNS = tl.constexpr(8)  # that it has at least, all of them the same


class RowTiles(NamedTuple):
    """How a product is divided."""

    warps: int  # that share the inputs
    ahead: int  # blocks that a warp loads before it needs them
    registers: int  # of a thread, at most: they bound the programs that run beside each other


@triton.jit  # type: ignore[untyped-decorator]
def _normed(row, norm, IS_GPU: tl.constexpr) -> tl.tensor:
    """Return the row times the norm's weights, rounded once. The compiler leaves it before what spreads the row."""
    if IS_GPU:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [row, norm],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=2,
        )
    else:
        found = (row.to(tl.float32) * norm.to(tl.float32)).to(row.dtype)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(x, k, step: tl.constexpr, K: tl.constexpr) -> tl.tensor:
    """Return x at inputs k (WARPS, PACKED) of a step."""
    FIRST: tl.constexpr = step * k.shape[0] * k.shape[1]
    if FIRST + k.shape[0] * k.shape[1] > K:
        found = tl.load(x + k + FIRST, k < K - FIRST, 0.0)
    else:
        found = tl.load(x + k + FIRST)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _weights(
    at,  # (16 * WARPS, J)
    is_row,
    own,  # blocks of these, (16 * WARPS, 1)
    scales,  # (WARPS, 16, 1)
    zeros,
    is_scaled,
    b,  # blocks of these, (WARPS, 1, 1)
    norm,
    k,
    step: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tuple:
    """Return the words, scales, zeros and norm of a step. Words are read once: they leave the cache first."""
    WARPS: tl.constexpr = k.shape[0]
    PACKED: tl.constexpr = k.shape[1]
    LEFT: tl.constexpr = (K + PACKED - 1) // PACKED - step * WARPS
    GROUPS: tl.constexpr = 0 if GROUP == K else step * WARPS * PACKED // GROUP
    if LEFT < WARPS:
        is_row, is_scaled = is_row & (own < LEFT), is_scaled & (b < LEFT)
    words = tl.load(at + step * WARPS * (PACKED // 4), is_row, 0, eviction_policy="evict_first")
    scale, zero = tl.load(scales + GROUPS, is_scaled, 0.0), tl.load(zeros + GROUPS, is_scaled, 0)
    return words, scale, zero, _inputs(norm, k, step, K) if HAS_NORM else 0


@triton.jit  # type: ignore[untyped-decorator]
def _product(weights, row, IS_EXACT: tl.constexpr, IS_GPU: tl.constexpr) -> tl.tensor:
    """Return the products of weights (WARPS, 16, PACKED) with rows (WARPS, PACKED): (WARPS, 16, COLUMNS or 1)."""
    if IS_EXACT:
        found = tl.sum(weights * row[:, None, :], 2)[:, :, None]
    else:
        rows = tl.broadcast_to(row[:, :, None], [row.shape[0], row.shape[1], COLUMNS])
        if not IS_GPU:  # the interpreter has no products of bfloat16
            weights, rows = weights.to(tl.float32), rows.to(tl.float32)
        found = tl.dot(weights, rows)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(
    x,  # (K,)
    weight,  # (N, K / 4) int16, K rounded up to PACKED; gated: (2 N, K / 4)
    scales,  # (N, K / GROUP); gated: 2 N
    zeros,  # as scales
    bias,  # (N,)
    norm,  # (K,)
    out,  # (N,)
    eps,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
    IS_EXACT: tl.constexpr,  # of float32, without tensor cores
    IS_GPU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    J: tl.constexpr = PACKED // 4
    BLOCKS: tl.constexpr = (K + PACKED - 1) // PACKED
    STEPS: tl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    OWN: tl.constexpr = ROWS // 2 if IS_GATED else ROWS  # outputs; gated: eight rows of the gate, and eight of up
    # Loaded as threads lie: each has a row of the first eight, all warps' before the others.
    r, i, b = tl.arange(0, ROWS * WARPS)[:, None], tl.arange(0, ROWS)[None, :, None], tl.arange(0, WARPS)[:, None, None]
    half, own = r // (8 * WARPS), r // 8 % WARPS
    n, in_order = tl.program_id(0) * OWN + r % 8, tl.program_id(0) * OWN + i % 8
    if IS_GATED:
        is_row, is_scaled = n < N, in_order < N
        n, in_order = n + half * N, in_order + i // 8 * N
    else:
        n, in_order = n + half * 8, in_order + i // 8 * 8
        is_row, is_scaled = n < N, in_order < N
    at = weight + n.to(tl.int64) * (BLOCKS * J) + (own * J + tl.arange(0, J)[None, :])
    group = in_order * (K // GROUP) + (b * 0 if GROUP == K else b * PACKED // GROUP)
    k = tl.arange(0, WARPS)[:, None] * PACKED + tl.arange(0, PACKED)[None, :]
    given = (at, is_row, own, scales + group, zeros + group, is_scaled, b, norm, k)
    weights, rows = tl.tuple(()), tl.tuple(())
    for step in tl.static_range(min(AHEAD, STEPS)):
        weights = weights + (_weights(*given, step, K, GROUP, HAS_NORM),)
    wait(CHAINED)
    for step in tl.static_range(min(AHEAD, STEPS)):
        rows = rows + (_inputs(x, k, step, K),)
    result = tl.zeros([WARPS, ROWS, 1 if IS_EXACT else COLUMNS], tl.float32)
    squares = tl.zeros([WARPS, PACKED], tl.float32)
    for step in tl.static_range(STEPS):
        words, scale, zero, factor = weights[step]
        row = rows[step]
        if HAS_NORM:
            one = row.to(tl.float32)
            squares += one * one
            row = _normed(row, factor, IS_GPU)
        # Inputs of a block in the order of its words, as `storage.packed` has them.
        row = tl.permute(tl.reshape(row, [WARPS, 4, 2, 2, 4, 2]), (0, 1, 4, 2, 3, 5))
        words = tl.permute(tl.reshape(words, [2, WARPS, 8, J]), (1, 0, 2, 3))
        z = (zero.to(tl.float32) + 128).to(row.dtype)
        a, c, d, e = planes(tl.reshape(words, [WARPS, ROWS, J]), (z, z, z, z), IS_GPU)
        part = _product(joined(a, c, d, e), tl.reshape(row, [WARPS, PACKED]), IS_EXACT, IS_GPU)
        result += part * scale.to(tl.float32)
        if step + AHEAD < STEPS:
            weights = weights + (_weights(*given, step + AHEAD, K, GROUP, HAS_NORM),)
            rows = rows + (_inputs(x, k, step + AHEAD, K),)
    found = tl.sum(tl.sum(result, 2) / result.shape[2], 0)
    if HAS_NORM:
        found *= 1 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
    gated = found
    if IS_GATED:
        found, gated = tl.split(tl.permute(tl.reshape(found, [2, OWN]), (1, 0)))
    to = tl.program_id(0) * OWN + tl.arange(0, OWN)
    store_result(found, gated, bias + to, to < N, out + to, to < N, HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


def one_row_int4(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
    tiles: RowTiles | None = None,
) -> Tensor:
    """x (1, K), weight (N, K) that is one of those taken -> (1, N), as `one_row_linear`. The row is taken as it is.

    Behind a norm it is rounded to its dtype before the norm's scale, which is applied to the product. `tiles`: in place
    of those chosen.
    """
    width, out = result_of(x, weight, is_gated, add_to)
    warps, ahead, registers = chosen_row_tiles(len(weight)) if tiles is None else tiles
    _row_kernel[(triton.cdiv(len(weight), ROWS.value),)](
        x,
        weight.values.view(torch.int16),
        weight.scales,
        weight.zeros,
        weight.scales if bias is None else bias,
        x if norm is None else norm,
        out,
        eps,
        width,
        K=weight.size,
        GROUP=weight.group,
        PACKED=PACKED,
        WARPS=warps,
        AHEAD=ahead,
        HAS_NORM=norm is not None,
        IS_EXACT=x.dtype is torch.float32,
        IS_GPU=x.is_cuda and x.dtype is torch.bfloat16,
        num_warps=warps,
        num_stages=1,
        maxnreg=registers,
        **stored_how(bias, is_gated, is_gelu, add_to),
        **chain(x),
    )
    return out


def takes(weight: Int4Weight) -> bool:
    """Return whether a group is one, two, four or more blocks, or all of a row."""
    blocks = weight.group // PACKED
    return weight.group == weight.size or (weight.group == blocks * PACKED and blocks & (blocks - 1) == 0)


def chosen_row_tiles(total: int) -> RowTiles:
    """Return the tiles for weights of so many rows; measured on an H100 by `benchmarks/int4_products.py`.

    Where all programs run at once, each has more warps.
    """
    return RowTiles(16, 2, 64) if total <= _FEW_ROWS else RowTiles(8, 2, 80)


_FEW_ROWS = 4224  # two programs for each of an H100's multiprocessors
