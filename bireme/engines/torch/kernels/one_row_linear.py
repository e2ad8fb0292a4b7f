"""The matrix product of one row, about as fast as the weights can be read.

With it, what stands before and after a product in a decoder layer: the norm of its input, its bias, the gated
activation, and the residual that its result is added to. The norm is a factor of the whole product, so it is found
while the row is multiplied. For more rows cuBLAS is quicker than what Triton's language makes of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.kernels.tiles import result_of, store_result, stored_how


@triton.jit  # type: ignore[untyped-decorator]
def _linear_kernel(
    x,  # (K,)
    weight,  # (N, K), gated: (2 N, K)
    bias,  # (N,)
    norm,  # (K,)
    out,  # (N,)
    eps,
    N,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, k = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    up = at + N.to(tl.int64) * K
    is_row = (n < N)[:, None]
    w = tl.load(at, is_row & (k < K)[None, :], 0.0)
    if IS_GATED:
        u = tl.load(up, is_row & (k < K)[None, :], 0.0)
    wait(CHAINED)
    sums = tl.zeros([TILE_N, TILE_K], tl.float32)
    ups = tl.zeros([TILE_N, TILE_K], tl.float32)
    squares = tl.zeros([TILE_K], tl.float32)
    for begin in range(0, K, TILE_K):
        is_there = begin + k < K
        one = tl.load(x + begin + k, is_there, 0.0).to(tl.float32)
        if HAS_NORM:
            squares += one * one
            one = one * tl.load(norm + begin + k, is_there, 0.0).to(tl.float32)
        if begin > 0:
            w = tl.load(at + begin, is_row & is_there[None, :], 0.0)
            if IS_GATED:
                u = tl.load(up + begin, is_row & is_there[None, :], 0.0)
        sums += w.to(tl.float32) * one[None, :]
        if IS_GATED:
            ups += u.to(tl.float32) * one[None, :]
    result, gated = tl.sum(sums, 1), tl.sum(ups, 1)
    if HAS_NORM:
        scale = 1 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        result, gated = result * scale, gated * scale
    store_result(result, gated, bias + n, n < N, out + n, n < N, HAS_BIAS, IS_GATED, IS_GELU, IS_ADDED)


def one_row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    is_gelu: bool = False,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x (1, K), weight (N, K) -> (1, N).

    norm (K,): of the RMS norm that x goes through first. Gated: weight is (2 N, K), gate above up, and the result is
    silu(gate) * up, or with tanh's approximation of GELU. `add_to` (1, N) is what the result is added to, in place.
    """
    size = x.shape[1]
    width, made = result_of(x, weight, is_gated, add_to if out is None else out)
    tile_n, tile_k, num_warps = _tiles(width, size, is_gated)
    _linear_kernel[(triton.cdiv(width, tile_n),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm,
        made,
        eps,
        width,
        K=size,
        TILE_N=tile_n,
        TILE_K=tile_k,
        HAS_NORM=norm is not None,
        num_warps=num_warps,
        **stored_how(bias, is_gated, is_gelu, add_to),
        **chain(x),
    )
    return made


def _tiles(width: int, size: int, is_gated: bool) -> tuple[int, int, int]:
    """Return the rows and columns of a tile, and its warps.

    Measured on an H200 at the shapes of 8B, where the choice is worth a tenth, and of 1B, where it is worth a fifth.
    """
    if size <= 2048:
        tile_k = min(1024, triton.next_power_of_2(size))
        return (2048 if is_gated else 4096) // tile_k, tile_k, 4
    if width <= 2048:
        return 4, 2048, 4
    tile_k = 1024 if size > 8192 else 2048
    return 4096 // tile_k, tile_k, 4 if width <= size else 8
