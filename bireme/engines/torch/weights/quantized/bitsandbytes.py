"""Weights of bitsandbytes: nf4 and fp4 in blocks of values, and int8 with a scale a row (LLM.int8).

Source: bitsandbytes' `QuantState.as_dict` (packed) and `dequantize_4bit`: of a byte the high half comes first, and
scales of blocks may be quantized themselves, to 8 bits of a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from bireme.engines.torch.weights.quantized.heads import Head, Shards
from bireme.engines.torch.weights.quantized.stored import StoredTensor, expect, part
from bireme.errors import ConfigError

_STATE = ".quant_state.bitsandbytes__"
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _QuantState(msgspec.Struct):
    """What the JSON beside a weight says."""

    shape: tuple[_Positive, ...]
    blocksize: _Positive
    nested_blocksize: _Positive | None = None  # None: scales are plain
    nested_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Table4Bit:
    """`data`: two values a byte; `scale`: one a block; `table`: the 16 values; `nested_*`: those of the scales."""

    shape: tuple[int, ...]
    block: int  # values that share a scale
    nested_block: int | None
    nested_offset: float

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scales = parts["scale"]
        if self.nested_block is not None:
            nested = parts["nested_scale"].float().repeat_interleave(self.nested_block)[: len(scales)]
            scales = parts["nested_table"][scales.int()] * nested + self.nested_offset
        pairs, count = parts["data"].flatten(), math.prod(self.shape)
        codes = torch.stack((pairs >> 4, pairs & 15), -1).flatten()[:count]
        values = parts["table"].float()[codes.int()]
        for index in range(0, count, whole := self.block * 4096):  # the scales of all values would be a second weight
            piece = values[index : index + whole]
            piece *= scales[index // self.block :][:4096].float().repeat_interleave(self.block)[: len(piece)]
        return values.view(self.shape).to(dtype)

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return None if math.isfinite(self.nested_offset) else "its quant_state's nested_offset is no number"


@dataclass(frozen=True, slots=True)
class RowInt8:
    """weight = int8 value * largest of its row / 127. `data`: (outputs, inputs); `scale`: (outputs,)."""

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (parts["data"].float().mul_(parts["scale"][:, None]).mul_(1 / 127)).to(dtype)

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        if "format" in parts and int(parts["format"]) != 0:
            return (
                f"its weight_format is {int(parts['format'])}; rows (0) are read: save it from CPU or newer libraries"
            )
        return None


def read_4bit(heads: Mapping[str, Head]) -> list[StoredTensor]:
    """Return all weights that have a quant_state, a few bytes of JSON each, which are read.

    Raises ConfigError for what is missing or of another shape.
    """
    shards, found = Shards({name: head for name, head in heads.items() if _STATE in name}), []
    for state_name in [name for name in heads if _STATE in name]:
        name = state_name.partition(_STATE)[0]
        try:
            state = msgspec.json.decode(bytes(shards.read(state_name).tolist()), type=_QuantState)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise ConfigError(f"{state_name} can't be read: {error}; fetch the checkpoint again") from error
        count = math.prod(state.shape)
        scales, why = -(-count // state.blocksize), f"{list(state.shape)} in blocks of {state.blocksize}"
        size = -(-count // 2)
        parts = {"data": name, "scale": f"{name}.absmax", "table": f"{name}.quant_map", "state": state_name}
        expect(name, part(heads, name, state_name), ("U8",), ((size, 1), (1, size), (size,)), why)
        nested = state.nested_blocksize
        expect(
            parts["scale"],
            part(heads, parts["scale"], name),
            ("F32",) if nested is None else ("U8",),
            ((scales,),),
            why,
        )
        expect(parts["table"], part(heads, parts["table"], name), ("F32",), ((16,),), "4 bits")
        if nested is not None:
            parts |= {"nested_scale": f"{name}.nested_absmax", "nested_table": f"{name}.nested_quant_map"}
            shape = (-(-scales // nested),)
            expect(parts["nested_scale"], part(heads, parts["nested_scale"], name), ("F32",), (shape,), why)
            expect(parts["nested_table"], part(heads, parts["nested_table"], name), ("F32",), ((256,),), "8 bits")
        form = Table4Bit(state.shape, state.blocksize, nested, state.nested_offset)
        found.append(StoredTensor(name, state.shape, form, parts))
    return found


def read_int8(heads: Mapping[str, Head]) -> list[StoredTensor]:
    """Return all int8 weights. Raises ConfigError for scales that are missing or of another shape."""
    found = []
    for name, head in heads.items():
        if not name.endswith(".weight") or head.dtype != "I8":
            continue
        module = name.removesuffix("weight")
        if len(head.shape) != 2:
            raise ConfigError(f"{name} has the shape {list(head.shape)}; int8 weights of two dimensions are read")
        parts = {"data": name, "scale": f"{module}SCB"}
        expect(parts["scale"], part(heads, parts["scale"], name), ("F32",), ((head.shape[0],),), "a scale a row")
        if f"{module}weight_format" in heads:
            parts["format"] = f"{module}weight_format"
            expect(parts["format"], heads[parts["format"]], ("U8",), ((), (1,)), "a format")
        found.append(StoredTensor(name, head.shape, RowInt8(), parts))
    return found
