"""Products of rows that are 8-bit floats, as the weights are: torch's own where the machine has it, else ours.

torch's (cuBLASLt's) takes a scale a row and a channel; with CUDA 12.9 and later on Hopper also scales of 1 x 128 values
and 128 x 128 blocks.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.child.lost_device import raise_if_lost
from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.storage import BLOCK, E4M3, Fp8Weight, WeightForm
from bireme.errors import one_line

logger = logging.getLogger("bireme.engines.torch")

FEW_ROWS = 64  # up to which our kernel is the quicker one, where there are no blocks
_STEP = 8  # of rows: cuBLASLt has no product with blocks for others, whose scales it finds unaligned
_SCALES_STEP = 4  # of blocks in a weight's row: cuBLAS reads the scales of 128 x 128 as if rows were padded to it


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rounded_kernel(
    x,  # (rows, K) 8-bit floats
    x_scales,  # (rows,), or of groups (K / BLOCK, rows), rounded up
    weight,  # (N, K) 8-bit floats
    scales,  # (N,), or of blocks (N / BLOCK, K / BLOCK), rounded up
    bias,  # (N,)
    out,  # (rows, N)
    rows,
    N,
    K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK: tl.constexpr,  # 0: there are no blocks
    HAS_BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    n, k = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    m = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    some_at = x + m[None, :].to(tl.int64) * K + k[:, None]
    is_row, is_own = (n < N)[:, None], (m < rows)[None, :]
    wait(CHAINED)
    result = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
    for begin in range(0, K, TILE_K):
        is_there = begin + k < K
        w = tl.load(at + begin, is_row & is_there[None, :], 0.0)
        some = tl.load(some_at + begin, is_there[:, None] & is_own, 0.0)
        if BLOCK:  # a tile is of one block
            own = tl.load(scales + tl.program_id(0) * TILE_N // BLOCK * ((K + BLOCK - 1) // BLOCK) + begin // BLOCK)
            group = tl.load(x_scales + begin // BLOCK * rows + m, m < rows, 0.0) * own
            result += tl.dot(w, some) * group[None, :]
        else:
            result = tl.dot(w, some, result)
    if not BLOCK:
        factor = tl.load(x_scales + m, m < rows, 0.0)
        result *= tl.load(scales + n, n < N, 0.0)[:, None] * factor[None, :]
    if HAS_BIAS:
        result += tl.load(bias + n, n < N, 0.0).to(tl.float32)[:, None]
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], result.to(out.dtype.element_ty), is_row & is_own)


def rounded_linear(
    x: Tensor, x_scales: Tensor, weight: Fp8Weight, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """x (rows, K) 8-bit floats with scales as `storage.rounded` makes them, weight (N, K) -> (rows, N)."""
    if _is_torchs(x, weight, dtype):
        try:
            return torchs(x, x_scales, weight, dtype, bias)
        except RuntimeError as error:
            if weight.form is not WeightForm.FP8_BLOCKS or isinstance(error, torch.OutOfMemoryError):
                raise
            raise_if_lost(error, "torch's product of 8-bit floats")
            _warn(len(x) % BLOCK, weight.shape, one_line(error))
    return ours(x, x_scales, weight, dtype, bias)


@functools.cache
def _warn(rows: int, shape: torch.Size, reason: str) -> None:
    """Once for each: it is slower than it could be."""
    logger.warning("torch_product_off rows_beyond_128=%d weight=%s reason=%s", rows, tuple(shape), reason)


def torchs(x: Tensor, x_scales: Tensor, weight: Fp8Weight, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The same by torch, for bfloat16 on a GPU."""
    if weight.form is WeightForm.FP8_BLOCKS:
        out = torch._scaled_mm(x, weight.values.t(), x_scales, weight.scales.t(), out_dtype=dtype)
        return out if bias is None else out.add_(bias)
    scales = x_scales[:, None], weight.scales[None, :]
    return torch._scaled_mm(x, weight.values.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=True)


def ours(
    x: Tensor,
    x_scales: Tensor,
    weight: Fp8Weight,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    tiles: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """The same by our kernel. `tiles`: rows, N and K of a tile, its warps and stages, in place of those chosen."""
    rows, size = x.shape
    width, block = len(weight), BLOCK if weight.form is WeightForm.FP8_BLOCKS else 0
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    tile_rows, tile_n, tile_k, num_warps, num_stages = tiles or _tiles(rows)
    tile_k = min(tile_k, BLOCK if block else max(32, triton.next_power_of_2(size)))
    _rounded_kernel[(triton.cdiv(width, tile_n), triton.cdiv(rows, tile_rows))](
        x,
        x_scales,
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        rows,
        width,
        K=size,
        TILE_ROWS=tile_rows,
        TILE_N=tile_n,
        TILE_K=tile_k,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        num_warps=num_warps,
        num_stages=num_stages,
        **chain(x),
    )
    return out


def _tiles(rows: int) -> tuple[int, int, int, int, int]:
    if rows > 64:
        return 128, 128, 128, 8, 4
    return max(16, triton.next_power_of_2(rows)), 64, 256, 4, 4


def _is_torchs(x: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> bool:
    if not x.is_cuda or dtype is not torch.bfloat16:
        return False
    if weight.form is WeightForm.FP8_CHANNEL:
        return len(x) > FEW_ROWS
    is_taken = len(x) % _STEP == 0 and weight.scales.shape[1] % _SCALES_STEP == 0
    return is_taken and _takes_blocks(x.device.index or 0)


@functools.cache
def _takes_blocks(index: int) -> bool:
    """Whether torch's product takes blocks on this GPU, and gets them right."""
    device, size = torch.device("cuda", index), 4 * BLOCK
    ones = torch.ones(size, size, dtype=E4M3, device=device)
    weight = Fp8Weight(ones, torch.arange(1.0, 17, device=device).view(4, 4))
    factors = torch.arange(1.0, 5, device=device)[:, None].expand(4, size).contiguous().t()
    expected = BLOCK * (weight.scales @ factors[0]).repeat_interleave(BLOCK)
    try:
        found = torchs(ones, factors, weight, torch.bfloat16)
        return bool(torch.allclose(found.float(), expected.expand_as(found), rtol=0.01))
    except RuntimeError as error:  # an older CUDA, another card
        raise_if_lost(error, "torch's product of 8-bit floats")
        return False
