"""Weights that are integers with a scale, and a zero point, for each row or for each group of a row's inputs.

weight[output, input] = (value - zero) * scale, of the input's group. Layouts differ in how values of 4 and 8 bits lie
in words of 32, which dimension is packed, and what is added to a zero before it is stored. Sources: AutoGPTQ's
qlinear_cuda_old.py (zeros less 1, act-order's `g_idx`) and GPTQModel's `gptq_v2`, AutoAWQ's gemm layout,
compressed-tensors' pack_quantized and naive_quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.engines.torch.weights.quantized.heads import Head
from bireme.engines.torch.weights.quantized.stored import SCALES, StoredTensor, expect, group_size_of, part
from bireme.errors import ConfigError

_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 outputs the n-th 4 bits of a word are


def unpack(words: Tensor, bits: int, dimension: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the values of int32 words, as uint8: 32 // bits to a word, the lowest bits first, along a dimension."""
    words, each = words.movedim(dimension, -1), _WORD // bits
    values = torch.empty(*words.shape, each, dtype=torch.uint8)
    for place, index in enumerate(order or range(each)):
        values[..., index] = (words >> (bits * place)) & ((1 << bits) - 1)
    return values.flatten(-2).movedim(-1, dimension)


def dequantize(
    values: Tensor, scales: Tensor, zeros: Tensor | int, groups: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (values - zeros) * scales.

    Values are (outputs, inputs), scales and zeros (outputs, groups), `groups` each input's; None: they lie in turn.
    """
    weights = values.float()
    if groups is not None:
        weights -= zeros if isinstance(zeros, int) else zeros.float()[:, groups.long()]
        weights *= scales.float()[:, groups.long()]
        return weights.to(dtype)
    in_groups = weights.view(len(weights), scales.shape[1], -1)
    in_groups -= zeros if isinstance(zeros, int) else zeros.float()[..., None]
    in_groups *= scales.float()[..., None]
    return weights.to(dtype)


def _fault_of(groups: Tensor | None, count: int) -> str | None:
    if groups is None or 0 <= int(groups.min()) <= int(groups.max()) < count:
        return None
    return f"its inputs are of the groups {int(groups.min())} to {int(groups.max())}, and there are {count}"


@dataclass(frozen=True, slots=True)
class Gptq:
    """`data`: (inputs / n, outputs) words of n values; `zero`: (groups, outputs / n); `scale`: (groups, outputs).

    `groups`: of each input, where the order of activations has mixed them.
    """

    bits: int
    added: int  # to a stored zero: 1 in GPTQ's first format, 0 in its second

    def unpacked(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return values (outputs, inputs), scales and zeros (outputs, groups)."""
        values = unpack(parts["data"], self.bits, 0).T.contiguous()
        # The first format stores a zero of 0 as the largest number that there is.
        zeros = (unpack(parts["zero"], self.bits, 1).int() + self.added) & ((1 << self.bits) - 1)
        return values, parts["scale"].T, zeros.T

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return dequantize(*self.unpacked(parts), parts.get("groups"), dtype)

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return _fault_of(parts.get("groups"), len(parts["scale"]))


@dataclass(frozen=True, slots=True)
class Awq:
    """`data`: (inputs, outputs / 8) words; `zero`: (groups, outputs / 8); `scale`: (groups, outputs)."""

    bits = 4

    def unpacked(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """As Gptq's."""
        values, zeros = (unpack(parts[role], self.bits, 1, _AWQ_ORDER) for role in ("data", "zero"))
        return values.T.contiguous(), parts["scale"].T, zeros.T

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return dequantize(*self.unpacked(parts), None, dtype)

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class CompressedIntegers:
    """`data`: (outputs, inputs / n) words, half of the range added to each value, or an int8 a value.

    `scale`: (outputs, groups), or one of all; `zero`: packed (outputs / n, groups), or int8 as the scales lie.
    """

    bits: int
    is_packed: bool

    def unpacked(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | int]:
        """As Gptq's; zeros that are one number are that of all."""
        values, zeros = parts["data"], parts.get("zero", 0)
        scales = parts["scale"].reshape(-1, parts["scale"].shape[-1] if parts["scale"].dim() else 1)
        if self.is_packed:
            values = unpack(values, self.bits, 1)
            zeros = unpack(zeros, self.bits, 0) if isinstance(zeros, Tensor) else 1 << (self.bits - 1)
        elif isinstance(zeros, Tensor):
            zeros = zeros.reshape(scales.shape).expand(len(values), -1)
        return values, scales.expand(len(values), -1), zeros

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return dequantize(*self.unpacked(parts), parts.get("groups"), dtype)

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return _fault_of(parts.get("groups"), parts["scale"].shape[-1] if parts["scale"].dim() else 1)


def _matrix(name: str, head: Head, dtype: str) -> tuple[int, int]:
    if head.dtype != dtype or len(head.shape) != 2:
        raise ConfigError(f"{name} is {head.dtype} {list(head.shape)}; {dtype} of two dimensions is read")
    return head.shape[0], head.shape[1]


def read_gptq(heads: Mapping[str, Head], bits: int, size: int, is_mixed: bool, added: int) -> list[StoredTensor]:
    """Return all `*.qweight`. `size`: of a group; `is_mixed`: inputs say which one they are of.

    Raises ConfigError for what is missing or of another shape.
    """
    each, found = _WORD // bits, []
    for name in [name for name in heads if name.endswith(".qweight")]:
        module = name.removesuffix("qweight")
        rows, outputs = _matrix(name, heads[name], "I32")
        inputs = rows * each
        own = group_size_of(f"{module}weight", size, inputs)
        why = f"{bits} bits and groups of {own} of {inputs} inputs"
        parts = {"data": name, "scale": f"{module}scales", "zero": f"{module}qzeros"}
        expect(parts["scale"], part(heads, parts["scale"], name), SCALES, ((inputs // own, outputs),), why)
        zeros = (inputs // own, -(-outputs // each))
        expect(parts["zero"], part(heads, parts["zero"], name), ("I32",), (zeros,), why)
        if outputs % each:
            raise ConfigError(f"{name} has {outputs} outputs, which words of {each} values don't divide")
        if is_mixed or f"{module}g_idx" in heads:
            parts["groups"] = f"{module}g_idx"
            expect(parts["groups"], part(heads, parts["groups"], name), ("I32", "I64"), ((inputs,),), why)
        found.append(StoredTensor(f"{module}weight", (outputs, inputs), Gptq(bits, added), parts))
    return found


def read_awq(heads: Mapping[str, Head], size: int) -> list[StoredTensor]:
    """Return all `*.qweight` of AWQ's gemm layout. Raises ConfigError for what is missing or of another shape."""
    each, found = _WORD // 4, []
    for name in [name for name in heads if name.endswith(".qweight")]:
        module = name.removesuffix("qweight")
        inputs, columns = _matrix(name, heads[name], "I32")
        own = group_size_of(f"{module}weight", size, inputs)
        why = f"4 bits and groups of {own} of {inputs} inputs"
        parts = {"data": name, "scale": f"{module}scales", "zero": f"{module}qzeros"}
        expect(parts["scale"], part(heads, parts["scale"], name), SCALES, ((inputs // own, columns * each),), why)
        expect(parts["zero"], part(heads, parts["zero"], name), ("I32",), ((inputs // own, columns),), why)
        found.append(StoredTensor(f"{module}weight", (columns * each, inputs), Awq(), parts))
    return found


def read_compressed_integers(
    heads: Mapping[str, Head], form: CompressedIntegers, size: int | str, has_zeros: bool
) -> list[StoredTensor]:
    """Return all integer weights of compressed-tensors. `size`: of a group; -1: a row; tensor: one scale for all.

    Raises ConfigError for what is missing or of another shape.
    """
    each = _WORD // form.bits if form.is_packed else 1
    end, found = "weight_packed" if form.is_packed else "weight", []
    for name, head in heads.items():
        if not name.endswith(f".{end}") or (not form.is_packed and head.dtype != "I8"):
            continue
        module = name.removesuffix(end)
        outputs, columns = _matrix(name, head, "I32" if form.is_packed else "I8")
        inputs = columns * each
        own = group_size_of(f"{module}weight", -1 if isinstance(size, str) else size, inputs)
        shared = "a scale for all" if isinstance(size, str) else f"groups of {own}"
        why = f"{form.bits} bits and {shared} of {inputs} inputs"
        counts = (outputs, inputs // own)
        shapes: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1)) if size == "tensor" else (counts,)
        parts = {"data": name, "scale": f"{module}weight_scale"}
        expect(parts["scale"], part(heads, parts["scale"], name), SCALES, shapes, why)
        if has_zeros:
            parts["zero"] = f"{module}weight_zero_point"
            dtype, of_zeros = ("I32", ((-(-outputs // each), counts[1]),)) if form.is_packed else ("I8", shapes)
            expect(parts["zero"], part(heads, parts["zero"], name), (dtype,), of_zeros, why)
            if outputs % each:
                raise ConfigError(f"{name} has {outputs} outputs, whose zeros words of {each} values don't divide")
        if form.is_packed:
            parts["shape"] = f"{module}weight_shape"
            expect(parts["shape"], part(heads, parts["shape"], name), ("I64", "I32"), ((2,),), "a matrix")
        if f"{module}weight_g_idx" in heads:
            parts["groups"] = f"{module}weight_g_idx"
            expect(parts["groups"], heads[parts["groups"]], ("I32", "I64"), ((inputs,),), why)
        found.append(StoredTensor(f"{module}weight", (outputs, inputs), form, parts))
    return found
