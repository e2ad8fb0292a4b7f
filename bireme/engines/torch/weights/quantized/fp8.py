"""FP8 weights (e4m3) with a scale a tensor, a row (output channel), or a block of rows and columns.

Sources: DeepSeek-V3's inference/kernel.py (`weight_dequant`: partial blocks at the edges), compressed-tensors'
`float-quantized`, FBGEMM's `weight_scale` a row, ModelOpt's unified export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.engines.torch.weights.quantized.heads import Head
from bireme.engines.torch.weights.quantized.stored import SCALES, StoredTensor, expect, part
from bireme.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fp8:
    """weight = e4m3 value * scale of its block. `data`: (rows, columns); `scale`: one a block, row by row."""

    block: tuple[int, int]  # rows and columns that share a scale

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        values = parts["data"].float()
        (rows, columns), (height, width) = values.shape, self.block
        scales = parts["scale"].float().reshape(-(-rows // height), -(-columns // width))
        for index, scale in enumerate(scales):
            values[index * height : (index + 1) * height] *= scale.repeat_interleave(width)[:columns]
        return values.to(dtype)

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return None


def read_fp8(heads: Mapping[str, Head], block: tuple[int, int] | str, suffix: str) -> list[StoredTensor]:
    """Return all e4m3 weights. `block`: tensor, channel, or rows and columns. `suffix`: of a scale's name.

    Raises ConfigError for scales that are missing, of another shape, or without a weight.
    """
    found = []
    for name, head in heads.items():
        if name.endswith(f".{suffix}") and f"{name.removesuffix(suffix)}weight" not in heads:
            raise ConfigError(f"{name}: there is no weight for it; fetch the checkpoint again")
        if head.dtype != "F8_E4M3" or not name.endswith(".weight"):
            continue
        if len(head.shape) != 2:
            raise ConfigError(f"{name} has the shape {list(head.shape)}; FP8 weights of two dimensions are read")
        rows, columns = head.shape
        own = {"tensor": (rows, columns), "channel": (1, columns)}[block] if isinstance(block, str) else block
        scale = f"{name.removesuffix('weight')}{suffix}"
        counts = (-(-rows // own[0]), -(-columns // own[1]))
        shapes = {"tensor": ((), (1,), (1, 1)), "channel": (counts, (rows,))}.get(str(block), (counts,))
        why = f"a scale {'for each ' if block != 'tensor' else 'a '}{_said(block)} of {list(head.shape)}"
        expect(scale, part(heads, scale, name), (*SCALES, "F8_E8M0"), shapes, why)
        found.append(StoredTensor(name, head.shape, Fp8(own), {"data": name, "scale": scale}))
    return found


def _said(block: tuple[int, int] | str) -> str:
    return block if isinstance(block, str) else f"block of {block[0]} x {block[1]}"
