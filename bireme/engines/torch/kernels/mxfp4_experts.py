"""Products of experts whose weights stay MXFP4: a tile's bytes are read as the files have them and converted there.

A byte holds the weights of an even input and of the next one, so that a tile is two products: of the low halves with
even inputs, of the high halves with odd ones. Inputs come in that order, all even ones first. Everything else is as in
experts.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.geometry import ClampedGate
from bireme.engines.torch.kernels.experts import Tiles, of_clamp, rows_of
from bireme.engines.torch.kernels.from_mxfp4 import high_values, low_values, powers
from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.paged_decode import precision
from bireme.engines.torch.kernels.row_wise import gated_up
from bireme.engines.torch.storage import Mxfp4Weight

_ROW_BYTES = 512  # of a tile of one row's products, whose rows of weights are 8


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(values, scale, TILE_N: tl.constexpr, TILE_K: tl.constexpr) -> tl.tensor:
    groups = tl.reshape(values, (TILE_N, TILE_K // 16, 16)) * scale.to(values.dtype)[:, :, None]
    return tl.reshape(groups, (TILE_N, TILE_K))


@triton.jit  # type: ignore[untyped-decorator]
def _added(
    result,
    values,
    scales,
    first,
    begin,
    is_row,
    even,
    odd,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_GPU: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return the result with the product of a tile of TILE_K bytes of rows `first`."""
    k, g = begin + tl.arange(0, TILE_K), begin // 16 + tl.arange(0, TILE_K // 16)
    codes = tl.load(values + first[:, None] * (K // 2) + k[None, :], is_row & (k < K // 2)[None, :], 0)
    exponents = tl.load(scales + first[:, None] * (K // 32) + g[None, :], is_row & (g < K // 32)[None, :], 0)
    scale = powers(exponents)
    low = _scaled(low_values(codes, IS_GPU).to(even.dtype), scale, TILE_N, TILE_K)
    result = tl.dot(low, even, result, input_precision=PRECISION)
    high = _scaled(high_values(codes, IS_GPU).to(even.dtype), scale, TILE_N, TILE_K)
    return tl.dot(high, odd, result, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _tiles_kernel(
    x,  # (P / PAIRS, K), even inputs first
    values,  # (E, N, K / 2), gated: (E, 2 N, K / 2)
    scales,  # (E, N, K / 32), or (E, 2 N, K / 32)
    bias,  # (E, N), or (E, 2 N)
    out,  # (P, N), gated: even columns first
    experts,
    pairs,
    num_pairs,
    N,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,  # bytes
    IS_GROUPED: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    IS_GPU: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, tile = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.program_id(1)
    k, r = tl.arange(0, TILE_K), tl.arange(0, ROWS)
    wait(CHAINED)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert >= 0:
        if IS_GROUPED:
            pair = tl.load(pairs + tile * ROWS + r)
        else:
            pair = tl.where(r == 0, tile, num_pairs)
        is_row, is_own = (n < N)[:, None], (pair < num_pairs)[None, :]
        of = x + (pair // PAIRS).to(tl.int64)[None, :] * K
        width = N.to(tl.int64)
        first, up = rows_of(expert, n, width, IS_GATED, LIMIT > 0)
        result = tl.zeros([TILE_N, ROWS], tl.float32)
        gated = tl.zeros([TILE_N, ROWS], tl.float32)
        for begin in range(0, K // 2, TILE_K):
            is_there = (begin + k < K // 2)[:, None] & is_own
            even = tl.load(of + (begin + k)[:, None], is_there, 0.0)
            odd = tl.load(of + K // 2 + (begin + k)[:, None], is_there, 0.0)
            result = _added(
                result, values, scales, first, begin, is_row, even, odd, K, TILE_N, TILE_K, IS_GPU, PRECISION
            )
            if IS_GATED:
                gated = _added(
                    gated, values, scales, first + up, begin, is_row, even, odd, K, TILE_N, TILE_K, IS_GPU, PRECISION
                )
        if HAS_BIAS:
            result += tl.load(bias + first, n < N, 0.0).to(tl.float32)[:, None]
        if HAS_BIAS and IS_GATED:
            gated += tl.load(bias + first + up, n < N, 0.0).to(tl.float32)[:, None]
        column = n
        if IS_GATED:
            result = gated_up(result, gated, False, LIMIT, ALPHA)
            column = n % 2 * (N // 2) + n // 2
        to = out + pair.to(tl.int64)[None, :] * width + column[:, None]
        tl.store(to, result.to(out.dtype.element_ty), is_row & is_own)


def even_first(x: Tensor) -> Tensor:
    """x (R, K) -> (R, K), all even columns before the odd ones."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).reshape(x.shape)


def mxfp4_linear(
    x: Tensor,
    weight: Mxfp4Weight,
    tiles: Tiles,
    is_gated: bool = False,
    bias: Tensor | None = None,
    clamp: ClampedGate | None = None,
) -> Tensor:
    """`experts_linear` of x (R, K) or (P, K), even columns first, which those of a gated result are as well."""
    size, width = x.shape[1], weight.shape[1] // 2 if is_gated else weight.shape[1]
    out = torch.empty(tiles.num_pairs, width, dtype=x.dtype, device=x.device)
    is_large = tiles.rows > 16
    tile_n = 128 if is_large else 64 if tiles.pairs is not None else 32
    _tiles_kernel[(triton.cdiv(width, tile_n), len(tiles.experts))](
        x,
        weight.values,
        weight.scales,
        x if bias is None else bias,
        out,
        tiles.experts,
        tiles.experts if tiles.pairs is None else tiles.pairs,
        tiles.num_pairs,
        width,
        K=size,
        PAIRS=tiles.num_pairs // len(x),
        ROWS=tiles.rows,
        TILE_N=tile_n,
        TILE_K=min(64 * 2 // x.dtype.itemsize, max(16, triton.next_power_of_2(size // 2))),
        IS_GROUPED=tiles.pairs is not None,
        IS_GATED=is_gated,
        HAS_BIAS=bias is not None,
        **of_clamp(clamp),
        IS_GPU=x.is_cuda,
        PRECISION=precision(x.dtype),
        num_warps=8 if is_large else 4,
        num_stages=3,
        **chain(tiles.chosen),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _row_product(
    values,
    scales,
    first,
    begin,
    is_row,
    even,
    odd,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_GPU: tl.constexpr,
) -> tl.tensor:
    """Return (TILE_N, TILE_K / 16): the products of groups of 32 inputs."""
    k, g = begin + tl.arange(0, TILE_K), begin // 16 + tl.arange(0, TILE_K // 16)
    codes = tl.load(values + first[:, None] * (K // 2) + k[None, :], is_row & (k < K // 2)[None, :], 0)
    exponents = tl.load(scales + first[:, None] * (K // 32) + g[None, :], is_row & (g < K // 32)[None, :], 0)
    found = low_values(codes, IS_GPU).to(tl.float32) * even[None, :]
    found += high_values(codes, IS_GPU).to(tl.float32) * odd[None, :]
    return tl.sum(tl.reshape(found, (TILE_N, TILE_K // 16, 16)), 2) * powers(exponents)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_row_kernel(
    x,  # (K,)
    values,  # (E, 2 N, K / 2)
    scales,  # (E, 2 N, K / 32)
    norm,  # (K,)
    bias,  # (E, 2 N)
    chosen,  # (TOP,)
    out,  # (TOP, N)
    eps,
    N,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    IS_GPU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, k, place = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K), tl.program_id(1)
    is_row = (n < N)[:, None]
    wait(CHAINED)
    first, up = rows_of(tl.load(chosen + place).to(tl.int64), n, N.to(tl.int64), True, LIMIT > 0)
    sums = tl.zeros([TILE_N, TILE_K // 16], tl.float32)
    ups = tl.zeros([TILE_N, TILE_K // 16], tl.float32)
    squares = tl.zeros([TILE_K], tl.float32)
    for begin in range(0, K // 2, TILE_K):
        at, is_there = 2 * (begin + k), begin + k < K // 2
        even = tl.load(x + at, is_there, 0.0).to(tl.float32)
        odd = tl.load(x + at + 1, is_there, 0.0).to(tl.float32)
        squares += even * even + odd * odd
        even = even * tl.load(norm + at, is_there, 0.0).to(tl.float32)
        odd = odd * tl.load(norm + at + 1, is_there, 0.0).to(tl.float32)
        sums += _row_product(values, scales, first, begin, is_row, even, odd, K, TILE_N, TILE_K, IS_GPU)
        ups += _row_product(values, scales, first + up, begin, is_row, even, odd, K, TILE_N, TILE_K, IS_GPU)
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    result, gated = tl.sum(sums, 1) * scale, tl.sum(ups, 1) * scale
    if HAS_BIAS:
        result += tl.load(bias + first, n < N, 0.0).to(tl.float32)
        gated += tl.load(bias + first + up, n < N, 0.0).to(tl.float32)
    result = gated_up(result, gated, False, LIMIT, ALPHA)
    tl.store(out + place * N + n, result.to(out.dtype.element_ty), n < N)


@triton.jit  # type: ignore[untyped-decorator]
def _add_row_kernel(
    inner,  # (TOP, K)
    values,  # (E, N, K / 2)
    scales,  # (E, N, K / 32)
    bias,  # (E, N)
    chosen,  # (TOP,)
    shares,  # (TOP,)
    x,  # (N,)
    N,
    K: tl.constexpr,
    TOP: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GPU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, k = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    is_row = (n < N)[:, None]
    width = N.to(tl.int64)
    wait(CHAINED)
    sums = tl.zeros([TILE_N, TILE_K // 16], tl.float32)
    result = tl.load(x + n, n < N, 0.0).to(tl.float32)
    for place in tl.static_range(TOP):
        first = tl.load(chosen + place).to(tl.int64) * width + n
        share = tl.load(shares + place)
        if HAS_BIAS:
            result += share * tl.load(bias + first, n < N, 0.0).to(tl.float32)
        for begin in range(0, K // 2, TILE_K):
            at, is_there = inner + place * K + 2 * (begin + k), begin + k < K // 2
            even = tl.load(at, is_there, 0.0).to(tl.float32) * share
            odd = tl.load(at + 1, is_there, 0.0).to(tl.float32) * share
            sums += _row_product(values, scales, first, begin, is_row, even, odd, K, TILE_N, TILE_K, IS_GPU)
    result += tl.sum(sums, 1)
    tl.store(x + n, result.to(x.dtype.element_ty), n < N)


def add_row_mxfp4(
    x: Tensor,
    norm: Tensor,
    eps: float,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Mxfp4Weight,
    down: Mxfp4Weight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: ClampedGate | None = None,
) -> None:
    """`add_row_experts` of these weights: adds to x (1, hidden), in place."""
    size, inner_size, top_k = x.shape[1], down.shape[2], chosen.numel()
    inner = torch.empty(top_k, inner_size, dtype=x.dtype, device=x.device)
    tile_k, tile_n = _row_tile(size)
    _gated_row_kernel[(triton.cdiv(inner_size, tile_n), top_k)](
        x,
        gate_up.values,
        gate_up.scales,
        norm,
        norm if gate_up_bias is None else gate_up_bias,
        chosen,
        inner,
        eps,
        inner_size,
        K=size,
        TILE_N=tile_n,
        TILE_K=tile_k,
        HAS_BIAS=gate_up_bias is not None,
        **of_clamp(clamp),
        IS_GPU=x.is_cuda,
        num_warps=4,
        **chain(x),
    )
    tile_k, tile_n = _row_tile(inner_size)
    _add_row_kernel[(triton.cdiv(size, tile_n),)](
        inner,
        down.values,
        down.scales,
        norm if down_bias is None else down_bias,
        chosen,
        shares,
        x,
        size,
        K=inner_size,
        TOP=top_k,
        TILE_N=tile_n,
        TILE_K=tile_k,
        HAS_BIAS=down_bias is not None,
        IS_GPU=x.is_cuda,
        num_warps=4,
        **chain(x),
    )


def _row_tile(size: int) -> tuple[int, int]:
    """Return the bytes and rows of a tile."""
    tile_k = min(_ROW_BYTES, max(16, triton.next_power_of_2(size // 2)))
    return tile_k, 8 * _ROW_BYTES // tile_k
