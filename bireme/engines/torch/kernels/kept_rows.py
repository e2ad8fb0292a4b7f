"""Keys and values as pools keep them: as they are computed, or as 8-bit floats (E4M3), multiples of a layer's scales.

What is too large for E4M3 becomes its largest value, as `storage.to_fp8` does it by torch's operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bireme.engines.torch.kernels.from_fp8 import as_bfloat16, halves_as_bfloat16


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


@triton.jit  # type: ignore[untyped-decorator]
def halves_of_queries(q, pool) -> tuple[tl.tensor, tl.tensor]:
    """Return what `scores` multiplies keys of this pool with, for queries (M, PAD_K)."""
    if (pool.dtype.element_ty == tl.float8e4nv) & (q.dtype != tl.float16):
        even, odd = tl.split(tl.reshape(q.to(tl.float32) * 2.0**100, [q.shape[0], q.shape[1] // 2, 2]))
        return even.to(q.dtype), odd.to(q.dtype)
    else:
        return q, q


@triton.jit  # type: ignore[untyped-decorator]
def scores(
    even_q,  # of `halves_of_queries`
    odd_q,
    keys,
    rows,  # (TILE,) of the pool
    is_there,  # (TILE,)
    scaling,
    K: tl.constexpr,
    PAD_K: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_GPU: tl.constexpr,
) -> tl.tensor:
    """Return (M, TILE) `scaling` times the queries' products with keys, less their scale.

    A pool of 8-bit floats is read as pairs, and elements of even numbers are multiplied apart from those of odd ones.
    So a value that is converted lies where the product wants it: tensor cores' operands are pairs of 16 bits, and
    there are loads from shared memory for those. Loading single bytes took more instructions than all else. Such pairs
    are 2 ** 120 times too small, which float16 has no numbers for: it has each element converted whole.
    """
    if (keys.dtype.element_ty == tl.float8e4nv) & (even_q.dtype != tl.float16):
        k: tl.constexpr = K // 2
        at = tl.arange(0, PAD_K // 2)
        pairs = keys.to(tl.pointer_type(tl.int16)) + rows[None, :] * k + at[:, None]
        even, odd = halves_as_bfloat16(tl.load(pairs, is_there[None, :] & (at < k)[:, None], 0), IS_GPU)
        score = tl.dot(even_q, even.to(even_q.dtype), input_precision=PRECISION)
        score = tl.dot(odd_q, odd.to(odd_q.dtype), score, input_precision=PRECISION)
        return score * (scaling * 2.0**20)
    else:
        at = tl.arange(0, PAD_K)
        key = tl.load(keys + rows[None, :] * K + at[:, None], is_there[None, :] & (at < K)[:, None], 0.0)
        return tl.dot(even_q, as_computed(key, even_q, IS_GPU), input_precision=PRECISION) * scaling


@triton.jit  # type: ignore[untyped-decorator]
def no_sums(M: tl.constexpr, PAD_K: tl.constexpr, pool, like) -> tuple[tl.tensor, tl.tensor]:
    """Return what `add_values` adds to: of 8-bit floats the sums of even elements and of odd ones, else sums."""
    if (pool.dtype.element_ty == tl.float8e4nv) & (like.dtype != tl.float16):
        return tl.zeros([M, PAD_K // 2], tl.float32), tl.zeros([M, PAD_K // 2], tl.float32)
    else:
        return tl.zeros([M, PAD_K], tl.float32), tl.zeros([M, 1], tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def add_values(
    sums,
    odd_sums,
    shrink,  # (M,) of the sums before
    weight,  # (M, TILE) float32
    like,  # has the dtype of products
    values,
    rows,  # (TILE,) of the pool
    is_there,  # (TILE,)
    K: tl.constexpr,
    PAD_K: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_GPU: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add a tile's weighted values, less their scale; see `scores`."""
    if (values.dtype.element_ty == tl.float8e4nv) & (like.dtype != tl.float16):
        k: tl.constexpr = K // 2
        at = tl.arange(0, PAD_K // 2)
        pairs = values.to(tl.pointer_type(tl.int16)) + rows[:, None] * k + at[None, :]
        even, odd = halves_as_bfloat16(tl.load(pairs, is_there[:, None] & (at < k)[None, :], 0), IS_GPU)
        weight = (weight * 2.0**100).to(like.dtype)
        sums = tl.dot(weight, even.to(like.dtype), sums * shrink[:, None], input_precision=PRECISION)
        odd_sums = tl.dot(weight, odd.to(like.dtype), odd_sums * shrink[:, None], input_precision=PRECISION)
    else:
        at = tl.arange(0, PAD_K)
        value = tl.load(values + rows[:, None] * K + at[None, :], is_there[:, None] & (at < K)[None, :], 0.0)
        value = as_computed(value, like, IS_GPU)
        sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
    return sums, odd_sums


@triton.jit  # type: ignore[untyped-decorator]
def whole_sums(sums, odd_sums, pool, like) -> tl.tensor:
    """Return the sums (M, PAD_K) of all elements."""
    if (pool.dtype.element_ty == tl.float8e4nv) & (like.dtype != tl.float16):
        joined = tl.reshape(tl.join(sums, odd_sums), [sums.shape[0], 2 * sums.shape[1]])
        return joined * 2.0**20
    else:
        return sums
