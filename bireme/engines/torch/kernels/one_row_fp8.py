"""`one_row_linear` for weights of 8-bit floats. They are read as words of four.

A byte after the other costs more instructions than there are while memory brings it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.tiles import four, result_of, store_result, stored_how
from bireme.engines.torch.storage import BLOCK, Fp8Weight, WeightForm


@triton.jit  # type: ignore[untyped-decorator]
def _floats(word, IS_GPU: tl.constexpr):
    """Return the four 8-bit floats of an int32 as float32, the lowest byte first."""
    if IS_GPU:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 p, q;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 p, low;
            cvt.rn.f16x2.e4m3x2 q, high;
            mov.b32 {a, b}, p;
            mov.b32 {c, d}, q;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }
            """,
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    a, b, c, d = word << 24, word << 16, word << 8, word
    return _float(a), _float(b), _float(c), _float(d)


@triton.jit  # type: ignore[untyped-decorator]
def _float(word) -> tl.tensor:
    """Return the 8-bit float in the highest byte: sign, exponent and mantissa are moved to a float32's places."""
    sign, rest = word & -0x80000000, (word >> 4) & 0x07F00000
    return (sign | rest).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120


@triton.jit  # type: ignore[untyped-decorator]
def _added(sums, words, x0, x1, x2, x3, IS_GPU: tl.constexpr) -> tl.tensor:
    """Return the sums with the products of these words (N, J) and their four values of x (J,) each."""
    w0, w1, w2, w3 = _floats(words, IS_GPU)
    sums += w0 * x0[None, :]
    sums += w1 * x1[None, :]
    sums += w2 * x2[None, :]
    return sums + w3 * x3[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _block_added(sums, words, x0, x1, x2, x3, scales, BLOCK: tl.constexpr, IS_GPU: tl.constexpr) -> tl.tensor:
    """Return `_added`, of blocks times the scales (J,) of their words."""
    if BLOCK:
        found = sums + _added(tl.zeros_like(sums), words, x0, x1, x2, x3, IS_GPU) * scales[None, :]
    else:
        found = _added(sums, words, x0, x1, x2, x3, IS_GPU)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _fp8_kernel(
    x,  # (K,)
    weight,  # (N, K / 4) words, gated: (2 N, K / 4)
    bias,  # (N,)
    norm,  # (K,)
    scales,  # (N,), or of blocks (N / BLOCK, K / BLOCK), rounded up; gated: 2 N
    out,  # (N,)
    eps,
    N,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_J: tl.constexpr,
    BLOCK: tl.constexpr,  # 0: the weight has no blocks
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
    IS_GPU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    J: tl.constexpr = K // 4
    ROW: tl.constexpr = (K + BLOCK - 1) // BLOCK if BLOCK else 1  # of blocks
    n, j = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_J)
    at = weight + n[:, None].to(tl.int64) * J + j[None, :]
    up = at + N.to(tl.int64) * J
    is_row = (n < N)[:, None]
    w = tl.load(at, is_row & (j < J)[None, :], 0)
    if BLOCK:  # a tile's rows are in one row of blocks
        at_scales, is_scaled = scales + tl.program_id(0) * TILE_N // BLOCK * ROW + j * 4 // BLOCK, j < J
        next_scales = N // BLOCK * ROW
    else:
        at_scales, is_scaled, next_scales = scales + n, n < N, N
    own = tl.load(at_scales, is_scaled, 0.0)
    up_own = tl.load(at_scales + next_scales, is_scaled & IS_GATED, 0.0)
    u = tl.load(up, is_row & (j < J)[None, :] & IS_GATED, 0)
    wait(CHAINED)
    sums = tl.zeros([TILE_N, TILE_J], tl.float32)
    ups = tl.zeros([TILE_N, TILE_J], tl.float32)
    squares = tl.zeros([TILE_J], tl.float32)
    for begin in range(0, J, TILE_J):
        is_there = begin + j < J
        x0, x1, x2, x3 = four(x, begin + j, is_there)
        if HAS_NORM:
            squares += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3
            f0, f1, f2, f3 = four(norm, begin + j, is_there)
            x0, x1, x2, x3 = x0 * f0, x1 * f1, x2 * f2, x3 * f3
        if begin > 0:
            w = tl.load(at + begin, is_row & is_there[None, :], 0)
            u = tl.load(up + begin, is_row & is_there[None, :] & IS_GATED, 0)
            if BLOCK:
                own = tl.load(at_scales + begin * 4 // BLOCK, is_there, 0.0)
                up_own = tl.load(at_scales + next_scales + begin * 4 // BLOCK, is_there & IS_GATED, 0.0)
        sums = _block_added(sums, w, x0, x1, x2, x3, own, BLOCK, IS_GPU)
        if IS_GATED:
            ups = _block_added(ups, u, x0, x1, x2, x3, up_own, BLOCK, IS_GPU)
    result, gated = tl.sum(sums, 1), tl.sum(ups, 1)
    if HAS_NORM:
        scale = 1 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        result, gated = result * scale, gated * scale
    if BLOCK == 0:
        result, gated = result * own, gated * up_own
    store_result(result, gated, bias + n, n < N, out + n, n < N, HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


def one_row_fp8(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """x (1, K), weight (N, K), K a multiple of four -> (1, N), as `one_row_linear`. The row is taken as it is."""
    size = x.shape[1]
    width, out = result_of(x, weight, is_gated, add_to)
    values, scales, block = weight.values, weight.scales, BLOCK if weight.form is WeightForm.FP8_BLOCKS else 0
    tile_n, tile_j, num_warps = _tiles(size // 4)
    _fp8_kernel[(triton.cdiv(width, tile_n),)](
        x,
        values.view(torch.int32),
        scales if bias is None else bias,
        x if norm is None else norm,
        scales,
        out,
        eps,
        width,
        K=size,
        TILE_N=tile_n,
        TILE_J=tile_j,
        BLOCK=block,
        HAS_NORM=norm is not None,
        IS_GPU=x.is_cuda,
        num_warps=num_warps,
        **stored_how(bias, is_gated, is_gelu, add_to),
        **chain(x),
    )
    return out


def _tiles(words: int) -> tuple[int, int, int]:
    """Return the rows and words of a tile, and its warps. A tile's words begin with a block's."""
    tile_j = min(512 if words > 512 else 256, triton.next_power_of_2(words))
    return min(BLOCK, 1024 // tile_j), tile_j, 4
