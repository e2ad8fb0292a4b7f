"""Products with 4-bit integers in groups (`storage.Int4Weight`): of one row, of few, and the plain weight for many.

A nibble becomes a float without a conversion: it is put where 128 of that type has the mantissa's bits of its ones, so
that the float is 128 more than it. One row is multiplied with that, and what was too much is taken off a group at a
time; of more rows it is taken off each value together with the zero point.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.paged_decode import precision
from bireme.engines.torch.kernels.tiles import four, result_of, store_result, stored_how
from bireme.engines.torch.storage import PLANE, Int4Weight

MOST_ROWS = 512  # of more the weight is made plain first


@triton.jit  # type: ignore[untyped-decorator]
def _scales_and_zeros(scales, zeros, n, k, N, K: tl.constexpr, GROUP: tl.constexpr) -> tl.tuple:
    """Return the scales of rows n at inputs k, whose shapes are broadcast, and 128 more than the zeros, as float32."""
    at, is_there = n.to(tl.int64) * (K // GROUP) + k // GROUP, (n < N) & (k < K)
    return tl.load(scales + at, is_there, 0.0).to(tl.float32), tl.load(zeros + at, is_there, 0).to(tl.float32) + 128


@triton.jit  # type: ignore[untyped-decorator]
def _nibble(word) -> tl.tensor:
    """Return 128 and the nibble that begins at bit 16, as float32."""
    return ((word & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _four_low(word) -> tl.tuple:
    return _nibble(word << 16), _nibble(word << 8), _nibble(word), _nibble(word >> 8)


@triton.jit  # type: ignore[untyped-decorator]
def _plane(word, x0, x1, x2, x3, scale, zero) -> tl.tensor:
    """Return the scaled products of the low nibbles of words (N, B, J) with their four values of x (1, B, J) each."""
    w0, w1, w2, w3 = _four_low(word)
    return (w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 - zero * (x0 + x1 + x2 + x3)) * scale


@triton.jit  # type: ignore[untyped-decorator]
def _normed(x, norm, quad, is_there, HAS_NORM: tl.constexpr) -> tl.tuple:
    """Return four values of x each, times the norm's, and their squares before that: all (1, B, J)."""
    x0, x1, x2, x3 = four(x, quad, is_there)
    squares = x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3
    if HAS_NORM:
        f0, f1, f2, f3 = four(norm, quad, is_there)
        x0, x1, x2, x3 = x0 * f0, x1 * f1, x2 * f2, x3 * f3
    return x0, x1, x2, x3, squares


@triton.jit  # type: ignore[untyped-decorator]
def _one_row_kernel(
    x,  # (K,)
    weight,  # (N, K / 8) words, K rounded up to 256; gated: (2 N, K / 8)
    scales,  # (N, K / GROUP); gated: 2 N
    zeros,  # as scales
    bias,  # (N,)
    norm,  # (K,)
    out,  # (N,)
    eps,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_B: tl.constexpr,  # blocks of 256 inputs
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    J: tl.constexpr = PLANE // 4  # words of a block
    BLOCKS: tl.constexpr = (K + 2 * PLANE - 1) // (2 * PLANE)
    row = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    n, b, j = row[:, None, None], tl.arange(0, TILE_B)[None, :, None], tl.arange(0, J)[None, None, :]
    at = weight + n.to(tl.int64) * (BLOCKS * J) + b * J + j
    up = at + N.to(tl.int64) * (BLOCKS * J)
    w = tl.load(at, (n < N) & (b < BLOCKS), 0)
    if IS_GATED:
        u = tl.load(up, (n < N) & (b < BLOCKS), 0)
    wait(CHAINED)
    sums = tl.zeros([TILE_N, TILE_B, J], tl.float32)
    ups = tl.zeros([TILE_N, TILE_B, J], tl.float32)
    squares = tl.zeros([1, TILE_B, J], tl.float32)
    for begin in range(0, BLOCKS, TILE_B):
        if begin > 0:
            is_word = (n < N) & (begin + b < BLOCKS)
            w = tl.load(at + begin * J, is_word, 0)
            if IS_GATED:
                u = tl.load(up + begin * J, is_word, 0)
        for half in tl.static_range(2):
            first = ((begin + b) * 2 + half) * PLANE
            quad = first // 4 + j
            x0, x1, x2, x3, own = _normed(x, norm, quad, 4 * quad < K, HAS_NORM)
            squares += own
            k = first  # of whose group all of the plane is
            if GROUP < PLANE:
                k = 4 * quad
            scale, zero = _scales_and_zeros(scales, zeros, n, k, N, K, GROUP)
            sums += _plane(w >> (4 * half), x0, x1, x2, x3, scale, zero)
            if IS_GATED:
                scale, zero = _scales_and_zeros(scales, zeros, n + N, k, 2 * N, K, GROUP)
                ups += _plane(u >> (4 * half), x0, x1, x2, x3, scale, zero)
    result, gated = tl.sum(tl.sum(sums, 2), 1), tl.sum(tl.sum(ups, 2), 1)
    if HAS_NORM:
        factor = 1 / tl.sqrt(tl.sum(squares) / K + eps)
        result, gated = result * factor, gated * factor
    store_result(result, gated, bias + row, row < N, out + row, row < N, HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


@triton.jit  # type: ignore[untyped-decorator]
def _values(w, zero, HIGH: tl.constexpr, IS_GPU: tl.constexpr) -> tl.tensor:
    """Return the low or high nibbles of bytes less `zero`, which is 128 more than the zero point: of its dtype."""
    if not IS_GPU:
        nibbles = (w >> 4) if HIGH else (w & 15)
        values = (nibbles.to(tl.float32) + 128 - zero.to(tl.float32)).to(zero.dtype)
    elif HIGH:
        values = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q, s, m;
            shr.u32 s, $2, 4;
            prmt.b32 p, s, 0, 0x4140;
            prmt.b32 q, s, 0, 0x4342;
            lop3.b32 p, p, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 q, q, 0x000f000f, 0x43004300, 0xea;
            mov.b32 m, 0xbf80bf80;
            fma.rn.bf16x2 $0, $3, m, p;
            fma.rn.bf16x2 $1, $4, m, q;
            }
            """,
            "=r,=r,r,r,r",
            [w, zero],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        values = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q, m;
            prmt.b32 p, $2, 0, 0x4140;
            prmt.b32 q, $2, 0, 0x4342;
            lop3.b32 p, p, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 q, q, 0x000f000f, 0x43004300, 0xea;
            mov.b32 m, 0xbf80bf80;
            fma.rn.bf16x2 $0, $3, m, p;
            fma.rn.bf16x2 $1, $4, m, q;
            }
            """,
            "=r,=r,r,r,r",
            [w, zero],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _added(
    result,
    w,
    some,
    scales,
    zeros,
    n,
    first,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    HIGH: tl.constexpr,
    IS_GPU: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return the result with the product of a plane: bytes (TILE_N, PLANE), inputs (PLANE, rows) from `first` on."""
    if GROUP < PLANE:  # some groups are in it
        k = first + tl.arange(0, PLANE)[None, :]
        scale, zero = _scales_and_zeros(scales, zeros, n, k, N, K, GROUP)
        values = _values(w, zero.to(some.dtype), HIGH, IS_GPU).to(tl.float32) * scale
        return tl.dot(values.to(some.dtype), some, result, input_precision=PRECISION)
    scale, zero = _scales_and_zeros(scales, zeros, n, first + tl.arange(0, 1)[None, :], N, K, GROUP)
    values = _values(w, zero.to(some.dtype), HIGH, IS_GPU)
    return result + tl.dot(values, some, input_precision=PRECISION) * scale


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rows_kernel(
    x,  # (rows, K)
    weight,  # (N, K / 2) bytes, K rounded up to 256; gated: (2 N, K / 2)
    scales,  # (N, K / GROUP); gated: 2 N
    zeros,  # as scales
    bias,  # (N,)
    out,  # (rows, N)
    rows,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
    IS_GPU: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + 2 * PLANE - 1) // (2 * PLANE)
    n, j = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N))[:, None], tl.arange(0, PLANE)
    m = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS))[None, :]
    at = weight + n.to(tl.int64) * (BLOCKS * PLANE) + j[None, :]
    some_at, k = x + m.to(tl.int64) * K + j[:, None], j[:, None]
    wait(CHAINED)
    result = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
    gated = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
    for block in range(BLOCKS):
        w = tl.load(at + block * PLANE, n < N, 0)
        if IS_GATED:
            u = tl.load(at + N.to(tl.int64) * (BLOCKS * PLANE) + block * PLANE, n < N, 0)
        for half in tl.static_range(2):
            first = (2 * block + half) * PLANE
            some = tl.load(some_at + first, (first + k < K) & (m < rows), 0.0)
            result = _added(result, w, some, scales, zeros, n, first, N, K, GROUP, PLANE, half, IS_GPU, PRECISION)
            if IS_GATED:
                own = n + N
                gated = _added(
                    gated, u, some, scales, zeros, own, first, 2 * N, K, GROUP, PLANE, half, IS_GPU, PRECISION
                )
    to, is_there = out + m.to(tl.int64) * N + n, (n < N) & (m < rows)
    store_result(result, gated, bias + n, n < N, to, is_there, HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


@triton.jit  # type: ignore[untyped-decorator]
def _plain_kernel(
    weight,  # (N, K / 2) bytes, K rounded up to 256
    scales,
    zeros,
    out,  # (N, K)
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    TILE_N: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + 2 * PLANE - 1) // (2 * PLANE)
    n, j = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N))[:, None], tl.arange(0, PLANE)[None, :]
    w = tl.load(weight + n.to(tl.int64) * (BLOCKS * PLANE) + tl.program_id(1) * PLANE + j, n < N, 0)
    for half in tl.static_range(2):
        k = (2 * tl.program_id(1) + half) * PLANE + j
        scale, zero = _scales_and_zeros(scales, zeros, n, k, N, K, GROUP)
        values = (((w >> (4 * half)) & 15).to(tl.float32) + 128 - zero) * scale
        tl.store(out + n.to(tl.int64) * K + k, values.to(out.dtype.element_ty), (n < N) & (k < K))


def one_row_int4(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
    tiles: tuple[int, int, int] | None = None,
) -> Tensor:
    """x (1, K), weight (N, K), K a multiple of four -> (1, N), as `one_row_linear`.

    `tiles`: rows of a tile, blocks of 256 inputs in it, its warps, in place of those chosen.
    """
    width, out = result_of(x, weight, is_gated, add_to)
    tile_b = min(8, triton.next_power_of_2(triton.cdiv(weight.size, 2 * PLANE)))
    tile_n, tile_b, num_warps = tiles or (max(1, (16 if is_gated else 32) // tile_b), tile_b, 4)
    _one_row_kernel[(triton.cdiv(width, tile_n),)](
        x,
        weight.values.view(torch.int32),
        weight.scales,
        weight.zeros,
        weight.scales if bias is None else bias,
        x if norm is None else norm,
        out,
        eps,
        width,
        K=weight.size,
        GROUP=weight.group,
        PLANE=PLANE,
        TILE_N=tile_n,
        TILE_B=tile_b,
        HAS_NORM=norm is not None,
        num_warps=num_warps,
        **stored_how(bias, is_gated, is_gelu, add_to),
        **chain(x),
    )
    return out


def few_tiles(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the tiles that `few_rows_int4` chooses.

    The compiler writes a product of float32 out, multiplication by multiplication: in tiles of 64 by 64 it took a GPU's
    kernel half a minute.
    """
    few = 16 if dtype is torch.float32 else max(16, min(64, triton.next_power_of_2(rows)))  # more has no room together
    return few, 32 if few == 16 else 64, 4, 4 if few < 64 else 3


def few_rows_int4(
    x: Tensor,
    weight: Int4Weight,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
    bias: Tensor | None = None,
    tiles: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """x (rows, K), weight (N, K) -> (rows, N), as `few_rows_linear`.

    `tiles`: rows and N of a tile, its warps and stages, in place of those chosen.
    """
    width, out = result_of(x, weight, is_gated, add_to)
    tile_rows, tile_n, num_warps, num_stages = tiles or few_tiles(len(x), x.dtype)
    _rows_kernel[(triton.cdiv(len(x), tile_rows), triton.cdiv(width, tile_n))](
        x,
        weight.values,
        weight.scales,
        weight.zeros,
        weight.scales if bias is None else bias,
        out,
        len(x),
        width,
        K=weight.size,
        GROUP=weight.group,
        PLANE=PLANE,
        TILE_ROWS=tile_rows,
        TILE_N=tile_n,
        IS_GPU=x.is_cuda and x.dtype is torch.bfloat16,
        PRECISION=precision(x.dtype),
        num_warps=num_warps,
        num_stages=num_stages,
        **stored_how(bias, is_gated, is_gelu, add_to),
        **chain(x),
    )
    return out


def plain_weight(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Return (N, K) in `dtype`, rounded once."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.values.device)
    tiles = triton.cdiv(len(weight), 32), triton.cdiv(weight.size, 2 * PLANE)
    parts = (weight.values, weight.scales, weight.zeros, out, len(weight))
    _plain_kernel[tiles](*parts, K=weight.size, GROUP=weight.group, PLANE=PLANE, TILE_N=32, num_warps=4)
    return out
