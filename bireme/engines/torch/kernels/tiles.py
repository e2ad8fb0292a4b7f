"""What products of all forms of weights have in common: four values of a row at once, and how a result is stored."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.kernels.row_wise import activated
from bireme.engines.torch.storage import Weight


@triton.jit  # type: ignore[untyped-decorator]
def four(x, j, is_there) -> tl.tuple:
    """Return x[4 j], x[4 j + 1] and so on as float32; of bfloat16 all at once."""
    if x.dtype.element_ty == tl.bfloat16:
        words = tl.load(x.to(tl.pointer_type(tl.int64)) + j, is_there, 0)
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
        a, b = (low << 16).to(tl.float32, bitcast=True), (low & -65536).to(tl.float32, bitcast=True)
        c, d = (high << 16).to(tl.float32, bitcast=True), (high & -65536).to(tl.float32, bitcast=True)
    else:
        at = x + 4 * j
        a, b = tl.load(at, is_there, 0.0).to(tl.float32), tl.load(at + 1, is_there, 0.0).to(tl.float32)
        c, d = tl.load(at + 2, is_there, 0.0).to(tl.float32), tl.load(at + 3, is_there, 0.0).to(tl.float32)
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator]
def store_result(
    result,
    gated,
    bias,
    is_output,
    to,
    is_there,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_ADDED: tl.constexpr,
) -> None:
    """Store the result with its bias, gated, or added to what is there. `bias`: pointers, of one shape with masks."""
    if HAS_BIAS:
        result += tl.load(bias, is_output, 0.0).to(tl.float32)
    if IS_GATED:
        result = activated(result, IS_GELU) * gated
    if IS_ADDED:
        result += tl.load(to, is_there, 0.0).to(tl.float32)
    tl.store(to, result.to(to.dtype.element_ty), is_there)


def result_of(x: Tensor, weight: Weight, is_gated: bool, add_to: Tensor | None) -> tuple[int, Tensor]:
    """Return the width of a product's result, and where it goes."""
    width = len(weight) // 2 if is_gated else len(weight)
    return width, torch.empty(len(x), width, dtype=x.dtype, device=x.device) if add_to is None else add_to


def stored_how(bias: Tensor | None, is_gated: bool, is_gelu: bool, add_to: Tensor | None) -> dict[str, Any]:
    """Return what `store_result` is told."""
    return {
        "HAS_BIAS": bias is not None,
        "IS_GATED": is_gated,
        "IS_GELU": is_gelu,
        "IS_ADDED": add_to is not None,
    }
