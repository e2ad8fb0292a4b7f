"""Keys and values as pools keep them: as they are computed, or as 8-bit floats (E4M3), multiples of a layer's scales.

What is too large for E4M3 becomes its largest value, as `storage.to_fp8` does it by torch's operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bireme.engines.torch.kernels.from_fp8 import as_bfloat16


@triton.jit  # type: ignore[untyped-decorator]
def as_kept(x, inverse, pool) -> tl.tensor:
    """Return what the pool at these pointers keeps of keys or values; `inverse`: of their scale."""
    if pool.dtype.element_ty == tl.float8e4nv:
        return tl.minimum(tl.maximum(x.to(tl.float32) * inverse, -448.0), 448.0).to(tl.float8e4nv)
    else:
        return x


@triton.jit  # type: ignore[untyped-decorator]
def as_computed(kept, like, IS_GPU: tl.constexpr) -> tl.tensor:
    """Return what was loaded of a pool in the dtype of `like`, less its scale."""
    if kept.dtype == tl.float8e4nv:
        return as_bfloat16(kept, IS_GPU).to(like.dtype)
    else:
        return kept
