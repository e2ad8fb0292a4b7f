"""What a decoder layer does to many rows between its matrix products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait


@triton.jit  # type: ignore[untyped-decorator]
def activated(x, IS_GELU: tl.constexpr) -> tl.tensor:
    """Return silu(x), or tanh's approximation of GELU: x times a sigmoid, both of them."""
    of = x
    if IS_GELU:
        of = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    return x / (1 + tl.exp(-of))


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(
    x, weight, out, eps, K: tl.constexpr, PAD_K: tl.constexpr, IS_ADDED: tl.constexpr, CHAINED: tl.constexpr
):
    k = tl.arange(0, PAD_K)
    at = tl.program_id(0).to(tl.int64) * K + k
    factor = tl.load(weight + k, k < K, 0.0).to(tl.float32)
    wait(CHAINED)
    row = tl.load(x + at, k < K, 0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(row * row, 0) / K + eps)
    row = row * scale * factor
    if IS_ADDED:
        row += tl.load(out + at, k < K, 0.0).to(tl.float32)
    tl.store(out + at, row.to(out.dtype.element_ty), k < K)


def rms_norm(x: Tensor, weight: Tensor, eps: float, add_to: Tensor | None = None) -> Tensor:
    """x (T, K) -> (T, K). `add_to` (T, K) is what the result is added to, in place."""
    rows, size = x.shape
    out = torch.empty_like(x) if add_to is None else add_to
    warps = 8 if size > 2048 else 4
    pad = triton.next_power_of_2(size)
    is_added = add_to is not None
    _norm_kernel[(rows,)](x, weight, out, eps, K=size, PAD_K=pad, IS_ADDED=is_added, num_warps=warps, **chain(x))
    return out


@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def _gate_kernel(gate_up, out, width, TILE: tl.constexpr, IS_GELU: tl.constexpr, CHAINED: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = column < width
    wait(CHAINED)
    gate = tl.load(gate_up + row * 2 * width + column, is_there, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, is_there, 0.0).to(tl.float32)
    tl.store(out + row * width + column, (activated(gate, IS_GELU) * up).to(out.dtype.element_ty), is_there)


def gate(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """gate_up (T, 2 I) -> silu(gate) * up (T, I), or with tanh's approximation of GELU."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, 1024))
    _gate_kernel[grid](gate_up, out, width, TILE=1024, IS_GELU=is_gelu, **chain(gate_up))
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _cap_kernel(x, size, softcap, TILE: tl.constexpr, CHAINED: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wait(CHAINED)
    row = tl.load(x + at, at < size, 0.0).to(tl.float32)
    row = softcap * (2 / (1 + tl.exp(-2 * row / softcap)) - 1)  # tanh
    tl.store(x + at, row.to(x.dtype.element_ty), at < size)


def cap(x: Tensor, softcap: float) -> Tensor:
    """x (T, K), contiguous -> softcap * tanh(x / softcap), in place."""
    _cap_kernel[(triton.cdiv(x.numel(), 1024),)](x, x.numel(), softcap, TILE=1024, **chain(x))
    return x
