"""Blocks of GGUF tensors, as numbers: what ggml's dequantize_row_* make of them, in float32.

Layouts are ggml-common.h's (block_q4_0 to block_q8_K), the order of values ggml-quants.c's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def dequantize(blocks: Tensor, kind: str) -> Tensor:
    """Return the values of blocks, (number of blocks, bytes of one) in uint8, as (number of blocks, values) in float32.

    `kind`: a name of `bireme.gguf.head.TYPES`.
    """
    return _KINDS[kind](blocks)


def _halves(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.float16).float()


def _fields(part: Tensor, num_groups: int, num_bits: int, num_fields: int) -> Tensor:
    """Return fields of bits, those of a group of bytes one after the other: (blocks, groups * fields * bytes)."""
    shifts = torch.arange(num_fields, dtype=torch.uint8) * num_bits
    grouped = part.reshape(len(part), num_groups, 1, -1)
    return ((grouped >> shifts.view(1, 1, -1, 1)) & ((1 << num_bits) - 1)).reshape(len(part), -1)


def _bits(part: Tensor) -> Tensor:
    """Return each bit of 4 bytes, lowest first: (blocks, 32)."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((part.unsqueeze(-1) >> shifts) & 1).reshape(len(part), -1)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply values with their group's scale: (blocks, values) and (blocks, groups)."""
    return (values.float().view(len(values), scales.shape[1], -1) * scales.unsqueeze(-1)).view(len(values), -1)


def _less(values: Tensor, minima: Tensor) -> Tensor:
    return (values.view(len(values), minima.shape[1], -1) - minima.unsqueeze(-1)).view(len(values), -1)


def _float32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _float16(blocks: Tensor) -> Tensor:
    return _halves(blocks)


def _bfloat16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    scale, quants = blocks.split((2, 16), 1)
    return _scaled(_fields(quants, 1, 4, 2).float() - 8, _halves(scale))


def _q4_1(blocks: Tensor) -> Tensor:
    scale, least, quants = blocks.split((2, 2, 16), 1)
    return _scaled(_fields(quants, 1, 4, 2), _halves(scale)) + _halves(least)


def _q5_0(blocks: Tensor) -> Tensor:
    scale, high, quants = blocks.split((2, 4, 16), 1)
    values = _fields(quants, 1, 4, 2) | (_bits(high) << 4)
    return _scaled(values.float() - 16, _halves(scale))


def _q5_1(blocks: Tensor) -> Tensor:
    scale, least, high, quants = blocks.split((2, 2, 4, 16), 1)
    values = _fields(quants, 1, 4, 2) | (_bits(high) << 4)
    return _scaled(values, _halves(scale)) + _halves(least)


def _q8_0(blocks: Tensor) -> Tensor:
    scale, quants = blocks.split((2, 32), 1)
    return _scaled(quants.contiguous().view(torch.int8), _halves(scale))


def _q2_k(blocks: Tensor) -> Tensor:
    scales, quants, scale, least = blocks.split((16, 64, 2, 2), 1)
    values = _scaled(_fields(quants, 2, 2, 4), _halves(scale) * (scales & 15).float())
    return _less(values, _halves(least) * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Tensor:
    high, quants, packed, scale = blocks.split((32, 64, 12, 2), 1)
    values = _fields(quants, 2, 2, 4).float() - (1 - _fields(high, 1, 1, 8).float()) * 4
    scales = _fields(packed[:, :8], 1, 4, 2) | (_fields(packed[:, 8:], 1, 2, 4) << 4)
    return _scaled(values, _halves(scale) * (scales.float() - 32))


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight 6-bit scales and minima that Q4_K and Q5_K keep in 12 bytes."""
    first, second, third = packed.split((4, 4, 4), 1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scale, least, packed, quants = blocks.split((2, 2, 12, 128), 1)
    scales, minima = _scales_and_minima(packed)
    return _less(_scaled(_fields(quants, 4, 4, 2), _halves(scale) * scales), _halves(least) * minima)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, least, packed, high, quants = blocks.split((2, 2, 12, 32, 128), 1)
    scales, minima = _scales_and_minima(packed)
    values = _fields(quants, 4, 4, 2) | (_fields(high, 1, 1, 8) << 4)
    return _less(_scaled(values, _halves(scale) * scales), _halves(least) * minima)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, scale = blocks.split((128, 64, 16, 2), 1)
    values = _fields(low, 2, 4, 2) | (_fields(high, 2, 2, 4) << 4)
    return _scaled(values.float() - 32, _halves(scale) * scales.contiguous().view(torch.int8).float())


def _q8_k(blocks: Tensor) -> Tensor:
    scale, quants, _ = blocks.split((4, 256, 32), 1)
    return _scaled(quants.contiguous().view(torch.int8), _float32(scale))


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _float32,
    "F16": _float16,
    "BF16": _bfloat16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
}
