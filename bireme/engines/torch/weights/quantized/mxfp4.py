"""MXFP4: values of 4 bits (e2m1), 32 of which share a power of two (e8m0), as gpt-oss publishes its experts.

Source: OCP Microscaling Formats 1.0. Of a byte the low half comes first. The files have the outputs as rows, whose 32s
lie side by side; the model has them as columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.engines.torch.weights.quantized.heads import Head
from bireme.engines.torch.weights.quantized.stored import StoredTensor, expect, part
from bireme.errors import ConfigError

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUP_BYTES = 16
_BIAS, _NAN = 127, 255


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """`data`: (experts, rows, groups, 16) bytes; `scale`: (experts, rows, groups) exponents."""

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return (experts, groups * 32, rows), made an expert at a time: all of them in float32 would be large."""
        data, exponents = parts["data"], parts["scale"]
        experts, rows, groups, _ = data.shape
        values = torch.tensor(_VALUES)
        plain = torch.empty(experts, groups * 32, rows, dtype=dtype)
        for index in range(experts):
            pairs = torch.stack((data[index] & 15, data[index] >> 4), -1).view(rows, groups, 32)
            weights = torch.ldexp(values[pairs.int()], exponents[index].int()[..., None] - _BIAS)
            plain[index] = weights.view(rows, groups * 32).T
        return plain

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return "a scale is NaN (an exponent of 255)" if (parts["scale"] == _NAN).any() else None


def read_mxfp4(heads: Mapping[str, Head]) -> list[StoredTensor]:
    """Return all `*_blocks` with their `*_scales`. Raises ConfigError for what is missing or of another shape."""
    found = []
    for name, head in heads.items():
        if name.endswith("_scales") and f"{name.removesuffix('scales')}blocks" not in heads:
            raise ConfigError(f"{name}: there are no blocks for it; fetch the checkpoint again")
        if not name.endswith("_blocks"):
            continue
        if head.dtype != "U8" or len(head.shape) != 4 or head.shape[3] != _GROUP_BYTES:
            raise ConfigError(
                f"{name} is {head.dtype} {list(head.shape)}; bytes of (experts, rows, groups, {_GROUP_BYTES}) are read"
            )
        experts, rows, groups, _ = head.shape
        scale = f"{name.removesuffix('blocks')}scales"
        expect(scale, part(heads, scale, name), ("U8",), (head.shape[:3],), "an exponent for each group")
        plain = (experts, groups * 32, rows)
        found.append(StoredTensor(name.removesuffix("_blocks"), plain, Mxfp4(), {"data": name, "scale": scale}))
    return found
