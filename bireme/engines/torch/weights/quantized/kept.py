"""Weights that stay as a checkpoint has them: in which forms, and how a projection is filled with what is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bireme.engines.torch.storage import BLOCK, Fp8Weight, StoredAs, StoredWeight, packed
from bireme.engines.torch.weights.quantized.fp8 import Fp8
from bireme.engines.torch.weights.quantized.heads import Shards, torch_dtype
from bireme.engines.torch.weights.quantized.integers import Awq, CompressedIntegers, Gptq
from bireme.engines.torch.weights.quantized.methods import Quantization
from bireme.engines.torch.weights.quantized.stored import StoredTensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def why_not_kept(quantization: Quantization, names: Iterable[str], shards: Shards) -> tuple[StoredAs | None, str]:
    """Return how the weights of these names, which are quantized, stay, all in one form; else None, and what keeps them
    from it.
    """
    found: dict[StoredAs, str] = {}
    for name in names:
        tensor = quantization.tensors[name]
        own = _stored_as(quantization, tensor)
        if own is None:
            return None, f"{name} is stored in a form that has no products here"
        if "groups" in tensor.parts and not _in_turn(shards.read(tensor.parts["groups"]), own.group):
            return None, f"{name} has its inputs in act-order"
        found.setdefault(own, name)
    if not found:
        return None, "each matrix of its layers is plain, or a part of it is"
    if len(found) > 1:
        return None, f"{', '.join(list(found.values())[:2])} are stored in different forms"
    return next(iter(found)), ""


def fill_with(tensors: Mapping[str, StoredTensor], shards: Shards, name: str, to: StoredWeight) -> None:
    """Fill a projection with what the files have of its weight. Raises ConfigError for scales that are no numbers."""
    tensor = tensors[f"{name}.weight"]
    tensor.check_values(shards)
    parts = tensor.read(shards)
    if isinstance(to, Fp8Weight):
        scales = parts["scale"].float()
        to.scales.copy_(scales.reshape(to.scales.shape) if scales.numel() > 1 else scales.reshape(()))
        to.values.copy_(parts["data"])
        return
    assert isinstance(tensor.form, Gptq | Awq | CompressedIntegers)
    values, scales, zeros = tensor.form.unpacked(parts)
    to.values.copy_(packed(values))
    to.scales.copy_(scales)
    to.zeros.fill_(zeros) if isinstance(zeros, int) else to.zeros.copy_(zeros)


def _stored_as(quantization: Quantization, tensor: StoredTensor) -> StoredAs | None:
    form, (rows, columns) = tensor.form, tensor.shape
    if isinstance(form, Fp8):
        algos = {(rows, columns): "FP8", (1, columns): "FP8_PER_CHANNEL_PER_TOKEN", (BLOCK, BLOCK): "FP8_BLOCK_SCALES"}
        algo = algos.get(form.block)
        return None if algo is None else StoredAs(algo)
    if not isinstance(form, Gptq | Awq | CompressedIntegers) or form.bits != 4:
        return None
    scale = quantization.heads[tensor.parts["scale"]]
    groups = scale.shape[0 if not isinstance(form, CompressedIntegers) else -1] if scale.shape else 1
    dtype = torch_dtype(scale.dtype)
    algo = "W4A16_AWQ" if isinstance(form, Awq) else "W4A16_GPTQ"
    return StoredAs(algo, columns // groups if groups > 1 else 0, dtype) if dtype in _FLOATS else None


def _in_turn(groups: Tensor, size: int) -> bool:
    return size == 0 or torch.equal(groups.long(), torch.arange(len(groups)) // size)
