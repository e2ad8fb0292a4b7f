"""What a decoder layer does to many rows between its matrix products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.launch import chain, wait
from bireme.engines.torch.storage import BLOCK, E4M3, LARGEST, SMALLEST, WeightForm


@triton.jit  # type: ignore[untyped-decorator]
def activated(x, IS_GELU: tl.constexpr) -> tl.tensor:
    """Return silu(x), or tanh's approximation of GELU: x times a sigmoid, both of them."""
    of = x
    if IS_GELU:
        of = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    return x / (1 + tl.exp(-of))


@triton.jit  # type: ignore[untyped-decorator]
def gated_up(gate, up, IS_GELU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr) -> tl.tensor:
    """Return what an expert makes of gate and up: `geometry.ClampedGate`; limit 0: there is none."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # what is no number stays so, as no minimum would have it
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate / (1 + tl.exp(-ALPHA * gate)) * (up + 1)
    return activated(gate, IS_GELU) * up


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


@triton.jit  # type: ignore[untyped-decorator]
def _store_rounded(
    row, out, scales, K: tl.constexpr, PAD_K: tl.constexpr, BLOCK: tl.constexpr, LARGEST, SMALLEST
) -> None:
    """Store row (PAD_K,) as 8-bit floats and their scales, `rows` apart; BLOCK 0: it has one."""
    k = tl.arange(0, PAD_K)
    if BLOCK:
        groups = tl.reshape(row, (PAD_K // BLOCK, BLOCK))
        scale = tl.maximum(tl.max(tl.abs(groups), 1), SMALLEST) / LARGEST
        g = tl.arange(0, PAD_K // BLOCK)
        tl.store(scales + g * tl.num_programs(0), scale, g * BLOCK < K)
        row = tl.reshape(groups / scale[:, None], (PAD_K,))
    else:
        scale = tl.maximum(tl.max(tl.abs(row), 0), SMALLEST) / LARGEST
        tl.store(scales, scale)
        row = row / scale
    tl.store(out + k, row.to(out.dtype.element_ty), k < K)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded_norm_kernel(
    x,
    more,  # as x: what is added to x first
    weight,
    out,
    scales,
    eps,
    LARGEST,
    SMALLEST,
    K: tl.constexpr,
    PAD_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_MORE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    k, at = tl.arange(0, PAD_K), tl.program_id(0).to(tl.int64) * K
    if HAS_NORM:
        factor = tl.load(weight + k, k < K, 0.0).to(tl.float32)
    wait(CHAINED)
    row = tl.load(x + at + k, k < K, 0.0).to(tl.float32)
    if HAS_MORE:
        row += tl.load(more + at + k, k < K, 0.0).to(tl.float32)
        tl.store(x + at + k, row.to(x.dtype.element_ty), k < K)
        row = row.to(x.dtype.element_ty).to(tl.float32)
    if HAS_NORM:
        row = row * (1 / tl.sqrt(tl.sum(row * row, 0) / K + eps)) * factor
        row = row.to(x.dtype.element_ty).to(tl.float32)
    _store_rounded(row, out + at, scales + tl.program_id(0), K, PAD_K, BLOCK, LARGEST, SMALLEST)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded_gate_kernel(
    gate_up,
    out,
    scales,
    LARGEST,
    SMALLEST,
    K: tl.constexpr,
    PAD_K: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    k, row = tl.arange(0, PAD_K), tl.program_id(0).to(tl.int64)
    wait(CHAINED)
    gate = tl.load(gate_up + row * 2 * K + k, k < K, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * K + K + k, k < K, 0.0).to(tl.float32)
    inner = (activated(gate, IS_GELU) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    _store_rounded(inner, out + row * K, scales + row, K, PAD_K, BLOCK, LARGEST, SMALLEST)


def rounded_rows(
    x: Tensor, form: WeightForm, norm: Tensor | None = None, eps: float = 0.0, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x (T, K) -> what `storage.rounded` makes of it, after an RMS norm with the factors `norm` (K,).

    `more` (T, K) is added to x, in place, before all. Scales of groups are a view of (groups, T).
    """
    out, scales, block, pad = _make_rounded(len(x), x.shape[1], form, x)
    _rounded_norm_kernel[(len(x),)](
        x,
        x if more is None else more,
        x if norm is None else norm,
        out,
        scales,
        eps,
        LARGEST,
        SMALLEST,
        K=x.shape[1],
        PAD_K=pad,
        BLOCK=block,
        HAS_MORE=more is not None,
        HAS_NORM=norm is not None,
        num_warps=8 if pad > 2048 else 4,
        **chain(x),
    )
    return out, scales


def rounded_gate(gate_up: Tensor, form: WeightForm, is_gelu: bool = False) -> tuple[Tensor, Tensor]:
    """gate_up (T, 2 I) -> what `storage.rounded` makes of `gate`'s result (T, I)."""
    out, scales, block, pad = _make_rounded(len(gate_up), gate_up.shape[1] // 2, form, gate_up)
    _rounded_gate_kernel[(len(gate_up),)](
        gate_up,
        out,
        scales,
        LARGEST,
        SMALLEST,
        K=out.shape[1],
        PAD_K=pad,
        BLOCK=block,
        IS_GELU=is_gelu,
        num_warps=16 if pad > 8192 else 8,
        **chain(gate_up),
    )
    return out, scales


def _make_rounded(rows: int, size: int, form: WeightForm, like: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return room for values and scales, the size of blocks (0: none), and the padded size of a row."""
    out, pad = torch.empty(rows, size, dtype=E4M3, device=like.device), triton.next_power_of_2(size)
    if form is not WeightForm.FP8_BLOCKS:
        return out, torch.empty(rows, dtype=torch.float32, device=like.device), 0, pad
    scales = torch.empty(-(-size // BLOCK), rows, dtype=torch.float32, device=like.device).t()
    return out, scales, BLOCK, max(BLOCK, pad)
