"""MXFP4, as gpt-oss publishes its experts: `storage.Mxfp4Weight` has the format.

The files have the outputs as rows, whose 32s lie side by side; the model has them as columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.engines.torch.storage import MXFP4_GROUP, Mxfp4Weight
from bireme.engines.torch.weights.quantized.heads import Head
from bireme.engines.torch.weights.quantized.stored import StoredTensor, expect, part
from bireme.errors import ConfigError

_GROUP_BYTES = MXFP4_GROUP // 2
_NAN = 255


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """`data`: (experts, rows, groups, 16) bytes; `scale`: (experts, rows, groups) exponents."""

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return (experts, groups * 32, rows), made an expert at a time: all of them in float32 would be large."""
        weight = Mxfp4Weight(parts["data"].flatten(2), parts["scale"])
        experts, rows, columns = weight.shape
        plain = torch.empty(experts, columns, rows, dtype=dtype)
        for index in range(experts):
            plain[index] = weight.expert(index).T
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
        plain = (experts, groups * MXFP4_GROUP, rows)
        found.append(StoredTensor(name.removesuffix("_blocks"), plain, Mxfp4(), {"data": name, "scale": scale}))
    return found
