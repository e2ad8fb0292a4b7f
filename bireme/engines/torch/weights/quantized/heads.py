"""What the shards of a checkpoint hold, by the heads of their files: names, dtypes and shapes, no data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

_ITEM_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}


@dataclass(frozen=True, slots=True)
class Head:
    """One stored tensor."""

    shard: Path
    dtype: str  # safetensors' name, e.g. F8_E4M3
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BITS.get(self.dtype, 8) // 8


def read_heads(shards: Iterable[Path]) -> dict[str, Head]:
    """Return the head of each tensor in safetensors files that `safe_open` has taken."""
    heads = {}
    for shard in shards:
        with shard.open("rb") as file:
            entries = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in entries.items():
            if name != "__metadata__":
                heads[name] = Head(shard, entry["dtype"], tuple(entry["shape"]))
    return heads


class Shards:
    """Reads tensors of open files. Thread-safe."""

    def __init__(self, heads: dict[str, Head]) -> None:
        self._heads = heads
        self._files: dict[Path, Any] = {
            shard: safe_open(shard, framework="pt") for shard in {head.shard for head in heads.values()}
        }

    def slice(self, name: str) -> Any:
        """Return safetensors' view of a tensor: `[...]` of it reads the data."""
        return self._files[self._heads[name].shard].get_slice(name)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._heads[name].shard].get_tensor(name)
        return tensor


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of safetensors' name where it is one that plain weights have."""
    return {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(name)
