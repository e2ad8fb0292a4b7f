"""The matrix product of 2 to 32 rows, with the activation or the addition that follows it in a decoder layer.

At the shapes of 8B it is level with cuBLAS or quicker, but for long rows of weights; what it saves is a kernel, and
the pause before and after one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.paged_decode import precision
from bireme.engines.torch.kernels.tiles import result_of, store_result, stored_how

MOST_ROWS = 32


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rows_kernel(
    x,  # (rows, K)
    weight,  # (N, K), gated: (2 N, K)
    bias,  # (N,)
    out,  # (rows, N)
    rows,
    N,
    K: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
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
        result = tl.dot(w, some, result, input_precision=PRECISION)
        if IS_GATED:
            u = tl.load(at + N.to(tl.int64) * K + begin, is_row & is_there[None, :], 0.0)
            gated = tl.dot(u, some, gated, input_precision=PRECISION)
    to, is_there = out + m[None, :] * N + n[:, None], is_row & is_own
    store_result(result, gated, bias + n[:, None], is_row, to, is_there, HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """x (rows, K), weight (N, K) -> (rows, N).

    Gated: weight is (2 N, K), gate above up, and the result is silu(gate) * up, or with tanh's approximation of
    GELU. `add_to` (rows, N) is what the result is added to, in place.
    """
    rows, size = x.shape
    width, out = result_of(x, weight, is_gated, add_to)
    tile_k = min((128 if is_gated else 256) * 2 // x.dtype.itemsize, max(16, triton.next_power_of_2(size)))
    _rows_kernel[(triton.cdiv(width, 64),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        width,
        K=size,
        PAD_ROWS=max(16, triton.next_power_of_2(rows)),
        TILE_N=64,
        TILE_K=tile_k,
        PRECISION=precision(x.dtype),
        num_warps=4,
        num_stages=4 if is_gated else 3,
        **stored_how(bias, is_gated, is_gelu, add_to),
        **chain(x),
    )
    return out
