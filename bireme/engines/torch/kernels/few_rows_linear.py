"""The matrix product of 2 to 32 rows, with the activation or the addition that follows it in a decoder layer.

At the shapes of 8B it is level with cuBLAS or quicker, but for long rows of weights; what it saves is a kernel, and
the pause before and after one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.from_fp8 import as_bfloat16
from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.paged_decode import precision
from bireme.engines.torch.kernels.tiles import result_of, store_result, stored_how
from bireme.engines.torch.storage import Fp8Weight, parts_of

MOST_ROWS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _as_x(w, x, IS_FP8: tl.constexpr, IS_GPU: tl.constexpr) -> tl.tensor:
    return as_bfloat16(w, IS_GPU).to(x.dtype.element_ty) if IS_FP8 else w


@triton.jit  # type: ignore[untyped-decorator]
def _added(
    result, w, some, scales, first, begin, K: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """Return the result with the product of a tile, which with blocks is of one block."""
    if BLOCK:
        scale = tl.load(scales + first // BLOCK * ((K + BLOCK - 1) // BLOCK) + begin // BLOCK)
        return result + tl.dot(w, some, input_precision=PRECISION) * scale
    return tl.dot(w, some, result, input_precision=PRECISION)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rows_kernel(
    x,  # (rows, K)
    weight,  # (N, K), gated: (2 N, K)
    bias,  # (N,)
    scales,  # of the weight: (N,), or of blocks (N / BLOCK, K / BLOCK) rounded up
    out,  # (rows, N)
    rows,
    N,
    K: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK: tl.constexpr,  # 0: the weight has no blocks
    IS_SCALED: tl.constexpr,
    IS_GPU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, k, m = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K), tl.arange(0, PAD_ROWS)
    at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    is_row, is_own = (n < N)[:, None], (m < rows)[None, :]
    wait(CHAINED)
    result = tl.zeros([TILE_N, PAD_ROWS], tl.float32)
    gated = tl.zeros([TILE_N, PAD_ROWS], tl.float32)
    for begin in range(0, K, TILE_K):
        is_there = begin + k < K
        w = tl.load(at + begin, is_row & is_there[None, :], 0.0)
        some = tl.load(x + m[None, :] * K + (begin + k)[:, None], is_there[:, None] & is_own, 0.0)
        first = tl.program_id(0) * TILE_N
        w = _as_x(w, x, IS_SCALED, IS_GPU)
        result = _added(result, w, some, scales, first, begin, K, BLOCK, PRECISION)
        if IS_GATED:
            u = tl.load(at + N.to(tl.int64) * K + begin, is_row & is_there[None, :], 0.0)
            u = _as_x(u, x, IS_SCALED, IS_GPU)
            gated = _added(gated, u, some, scales, N + first, begin, K, BLOCK, PRECISION)
    if IS_SCALED and not BLOCK:
        result *= tl.load(scales + n, n < N, 0.0)[:, None]
        gated *= tl.load(scales + IS_GATED * N + n, n < N, 0.0)[:, None]
    to, is_there = out + m[None, :] * N + n[:, None], is_row & is_own
    store_result(result, gated, bias + n[:, None], is_row, to, is_there, HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


def few_rows_linear(
    x: Tensor,
    weight: Tensor | Fp8Weight,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """x (rows, K), weight (N, K) -> (rows, N). The rows are taken as they are, in whatever form the weight is.

    Gated: weight is (2 N, K), gate above up, and the result is silu(gate) * up, or with tanh's approximation of
    GELU. `add_to` (rows, N) is what the result is added to, in place.
    """
    rows, size = x.shape
    width, out = result_of(x, weight, is_gated, add_to)
    values, scales, block = parts_of(weight)
    tile_k = min((128 if is_gated else 256) * 2 // x.dtype.itemsize, max(16, triton.next_power_of_2(size)))
    if block:
        tile_k = min(tile_k, block)
    _rows_kernel[(triton.cdiv(width, 64),)](
        x,
        values,
        values if bias is None else bias,
        values if scales is None else scales,
        out,
        rows,
        width,
        K=size,
        PAD_ROWS=max(16, triton.next_power_of_2(rows)),
        TILE_N=64,
        TILE_K=tile_k,
        BLOCK=block,
        IS_SCALED=scales is not None,
        IS_GPU=x.is_cuda and x.dtype is torch.bfloat16,
        PRECISION=precision(x.dtype),
        num_warps=4,
        num_stages=4 if is_gated else 3,
        **stored_how(bias, is_gated, is_gelu, add_to),
        **chain(x),
    )
    return out
