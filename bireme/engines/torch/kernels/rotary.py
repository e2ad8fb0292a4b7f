"""Norms and rotary positions of queries and keys, and the step's rows of the pools.

`cos_sin` is (positions, K): the cosines of the K / 2 angles, then their sines, float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.engines.torch.geometry import UNSCALED, KvScales
from bireme.engines.torch.kernels.kept_rows import as_kept
from bireme.engines.torch.kernels.launch import chain, wait


@triton.jit  # type: ignore[untyped-decorator]
def rotated(
    at, norm, cos_sin, is_there, eps, K: tl.constexpr, PAD_K: tl.constexpr, HAS_NORM: tl.constexpr
) -> tl.tensor:
    """Return heads (rows, PAD_K) that begin at the pointers `at`, normed and turned; `cos_sin` is their position's."""
    k = tl.arange(0, PAD_K)
    half: tl.constexpr = K // 2
    other = tl.where(k < half, k + half, k - half)
    mask = is_there[:, None] & (k < K)[None, :]
    own = tl.load(at[:, None] + k[None, :], mask, 0.0).to(tl.float32)
    turned = tl.load(at[:, None] + other[None, :], mask, 0.0).to(tl.float32)
    if HAS_NORM:
        scale = (1 / tl.sqrt(tl.sum(own * own, 1) / K + eps))[:, None]
        own = own * scale * tl.load(norm + k, k < K, 0.0).to(tl.float32)[None, :]
        turned = turned * scale * tl.load(norm + other, k < K, 0.0).to(tl.float32)[None, :]
    cos = tl.load(cos_sin + k % half, k < K, 0.0)
    sin = tl.load(cos_sin + half + k % half, k < K, 0.0)
    return own * cos[None, :] + turned * tl.where(k < half, -sin, sin)[None, :]


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # type: ignore[untyped-decorator]
def _rotate_kernel(
    qkv,  # (T, (H + 2 N) K)
    q_norm,  # (K,)
    k_norm,
    cos_sin,
    positions,  # (T,)
    slots,  # (T,)
    keys,
    values,
    out,  # (T, H + N, K)
    eps,
    key_inverse,  # of the pools' scales
    value_inverse,
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PAD_K: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, PAD_K)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    wait(CHAINED)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * K
    row = tl.load(slots + token).to(tl.int64) * N
    at = qkv + token * (H + 2 * N) * K + head * K
    is_size = (k < K)[None, :]
    to = out + (token * (H + N) + head[:, None]) * K + k[None, :]
    if tl.program_id(1) * HEADS < H:
        query = rotated(at, q_norm, angles, head < H, eps, K, PAD_K, HAS_NORM)
        tl.store(to, query.to(out.dtype.element_ty), (head < H)[:, None] & is_size)
    if tl.program_id(1) * HEADS + HEADS > H:
        is_key = (head >= H) & (head < H + N)
        key = rotated(at, k_norm, angles, is_key, eps, K, PAD_K, HAS_NORM).to(out.dtype.element_ty)
        tl.store(to, key, is_key[:, None] & is_size)
        key = as_kept(key, key_inverse, keys)
        tl.store(keys + (row + head - H)[:, None] * K + k[None, :], key, is_key[:, None] & is_size)
        is_value = (head >= H + N) & (head < H + 2 * N)
        value = tl.load(at[:, None] + k[None, :], is_value[:, None] & is_size, 0.0)
        value = as_kept(value, value_inverse, values)
        tl.store(values + (row + head - H - N)[:, None] * K + k[None, :], value, is_value[:, None] & is_size)


def rotate_and_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    scales: KvScales = UNSCALED,
) -> Tensor:
    """qkv (T, (H + 2 N) K), positions and slots (T,) -> queries and keys (T, H + N, K); fills the pools' rows.

    The keys that are returned are as computed, whatever the pools keep.
    """
    tokens, size = len(qkv), cos_sin.shape[1]
    num_kv = keys.shape[1] // size
    out = torch.empty(tokens, num_heads + num_kv, size, dtype=qkv.dtype, device=qkv.device)
    heads = 8
    _rotate_kernel[(tokens, triton.cdiv(num_heads + 2 * num_kv, heads))](
        qkv,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        cos_sin,
        positions,
        slots,
        keys,
        values,
        out,
        eps,
        1 / scales.keys,
        1 / scales.values,
        H=num_heads,
        N=num_kv,
        K=size,
        PAD_K=triton.next_power_of_2(size),
        HEADS=heads,
        HAS_NORM=q_norm is not None,
        num_warps=2,
        **chain(qkv),
    )
    return out
