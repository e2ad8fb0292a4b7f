"""What a decoder layer does to many rows between its matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(x, weight, out, eps, K: tl.constexpr, PAD_K: tl.constexpr, CHAINED: tl.constexpr):
    k = tl.arange(0, PAD_K)
    at = tl.program_id(0).to(tl.int64) * K + k
    factor = tl.load(weight + k, k < K, 0.0).to(tl.float32)
    wait(CHAINED)
    row = tl.load(x + at, k < K, 0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(row * row, 0) / K + eps)
    tl.store(out + at, (row * scale * factor).to(out.dtype.element_ty), k < K)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (T, K) -> (T, K)."""
    rows, size = x.shape
    out = torch.empty_like(x)
    warps = 8 if size > 2048 else 4
    pad = triton.next_power_of_2(size)
    _norm_kernel[(rows,)](x, weight, out, eps, K=size, PAD_K=pad, num_warps=warps, **chain(x))
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[1],), weight.float(), eps).to(x.dtype)


@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def _silu_kernel(gate_up, out, width, TILE: tl.constexpr, CHAINED: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = column < width
    wait(CHAINED)
    gate = tl.load(gate_up + row * 2 * width + column, is_there, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, is_there, 0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), is_there)


def silu_times(gate_up: Tensor) -> Tensor:
    """gate_up (T, 2 I) -> silu(gate) * up (T, I)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_kernel[(rows, triton.cdiv(width, 1024))](gate_up, out, width, TILE=1024, **chain(gate_up))
    return out


def silu_times_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)
