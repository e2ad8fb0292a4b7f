"""Weights in ggml's block formats, made and read in numpy as ggml-quants.c does: what kernels are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

FORMS = ("Q4_0", "Q4_1", "Q8_0")


def quantize(weight: Any, form: str) -> Any:
    """Return blocks (rows, bytes) in uint8 of float weights (rows, columns): quantize_row_*_ref."""
    groups = np.asarray(weight, np.float32).reshape(len(weight), -1, 32)
    if form == "Q4_1":
        least = groups.min(-1, keepdims=True)
        scale = (groups.max(-1, keepdims=True) - least) / 15
        halves = [scale.astype("<f2"), least.astype("<f2")]
        codes = np.floor(divided(groups - least, scale) + 0.5).clip(0, 15).astype(np.uint8)
    elif form == "Q4_0":
        most = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)
        scale = most / -8
        halves = [scale.astype("<f2")]
        codes = np.floor(divided(groups, scale) + 8.5).clip(0, 15).astype(np.uint8)
    else:
        scale = np.abs(groups).max(-1, keepdims=True) / 127
        halves = [scale.astype("<f2")]
        codes = np.round(divided(groups, scale)).astype(np.int8).view(np.uint8)
    if form != "Q8_0":
        codes = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([*(half.view(np.uint8) for half in halves), codes], -1).reshape(len(weight), -1)


def dequantize(blocks: Any, form: str) -> Any:
    """Return what blocks mean, (rows, columns) in float64: dequantize_row_*."""
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
    groups = blocks.reshape(len(blocks), -1, sizes[form])
    halves = np.ascontiguousarray(groups[..., : 4 if form == "Q4_1" else 2]).view("<f2").astype(np.float64)
    codes = groups[..., 4 if form == "Q4_1" else 2 :]
    if form == "Q8_0":
        values = np.ascontiguousarray(codes).view(np.int8) * halves[..., :1]
    else:
        whole = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float64)
        values = (whole - 8) * halves[..., :1] if form == "Q4_0" else whole * halves[..., :1] + halves[..., 1:]
    return values.reshape(len(blocks), -1)


def round_rows(x: Any) -> Any:
    """Return x as products see it: 8 bits for each group of 32, times its scale (quantize_row_q8_0_ref)."""
    groups = np.asarray(x, np.float64).reshape(len(x), -1, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    return (np.round(divided(groups, scale)) * scale).reshape(len(x), -1)


def divided(values: Any, scale: Any) -> Any:
    return np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)
