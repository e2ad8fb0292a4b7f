"""Weights of a model's layers as 8-bit floats: linear modules that hold them, and a model that is rounded at its load.

The projections of a layer that decoders read as one matrix lie in one, of which each module has its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.storage import (
    BLOCK,
    E4M3,
    LARGEST,
    SMALLEST,
    Fp8Weight,
    WeightForm,
    restored,
    rounded,
    rounds_activations,
)
from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines.torch")
_JOINED = (("q_proj", "k_proj", "v_proj"), ("o_proj",)), (("gate_proj", "up_proj"), ("down_proj",))
_STEP = 16  # what torch's product divides both sides of a weight by


class Fp8Linear(torch.nn.Module):  # type: ignore[misc]
    """In the place of a torch.nn.Linear. It computes in float32 what products of this form do: their reference."""

    def __init__(self, stored: Fp8Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", stored.values)
        self.register_buffer("weight_scale", stored.scales)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    @property
    def stored(self) -> Fp8Weight:
        return Fp8Weight(self.weight, self.weight_scale)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)."""
        weight, rows = self.stored, x.reshape(-1, x.shape[-1])
        taken = restored(*rounded(rows, weight.form)) if rounds_activations(weight.form, len(rows)) else rows.float()
        bias = None if self.bias is None else self.bias.float()
        return F.linear(taken, weight.dequantized(), bias).to(x.dtype).view(*x.shape[:-1], -1)


def keep_in_fp8(model: Any, algo: str, device: torch.device) -> None:
    """Round the projections of a decoder's layers by TensorRT-LLM's QuantAlgo, one after the other, on `device`.

    `FP8` has one scale for a projection, `FP8_PER_CHANNEL_PER_TOKEN` one for each of its rows, `FP8_BLOCK_SCALES` one
    for a block. Each projection's own weights are let go of before the next one's are rounded. Raises ConfigError.
    """
    body = model.get_submodule(model.base_model_prefix)
    check_shapes(body, algo)
    with torch.inference_mode(False), torch.no_grad():
        for layer in body.layers:
            for owner, groups in zip((layer.self_attn, layer.mlp), _JOINED, strict=True):
                for names in groups:
                    _replace(owner, names, algo, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was rounded
        logger.info(
            "weights_rounded algo=%s mib=%d peak_mib=%d",
            algo,
            torch.cuda.memory_allocated(device) >> 20,
            torch.cuda.max_memory_allocated(device) >> 20,
        )


def check_shapes(body: Any, algo: str) -> None:
    """Raise ConfigError for a projection that no product of this form takes, before anything is rounded."""
    layer = body.layers[0]
    for owner, groups in zip((layer.self_attn, layer.mlp), _JOINED, strict=True):
        for names in groups:
            for at, name in enumerate(names):
                if not isinstance(linear := getattr(owner, name, None), torch.nn.Linear):
                    raise ConfigError(
                        f"quant_config.quant_algo: {algo}; {name} is no linear projection here (of a mixture of"
                        " experts): remove it, or use engine: trtllm"
                    )
                rows, columns = linear.weight.shape
                is_last = at + 1 == len(names) and "gate_proj" not in names
                step = BLOCK if algo == "FP8_BLOCK_SCALES" and not is_last else _STEP
                if rows % step or columns % _STEP:
                    raise ConfigError(
                        f"quant_config.quant_algo: {algo}; {name} is ({rows}, {columns}), whose rows do not divide"
                        f" by {step} or columns by {_STEP}; set FP8_PER_CHANNEL_PER_TOKEN, or remove it"
                    )


def _replace(owner: Any, names: Sequence[str], algo: str, device: torch.device) -> None:
    """Have these projections of the module share one matrix of 8-bit floats."""
    lengths = [len(getattr(owner, name).weight) for name in names]
    columns, has_blocks = getattr(owner, names[0]).weight.shape[1], algo == "FP8_BLOCK_SCALES"
    device = device if getattr(owner, names[0]).weight.device.type != "meta" else torch.device("meta")
    values = torch.empty(sum(lengths), columns, dtype=E4M3, device=device)
    shape = (-(-sum(lengths) // BLOCK), -(-columns // BLOCK)) if has_blocks else (sum(lengths),)
    scales, begin = torch.empty(shape, dtype=torch.float32, device=device), 0
    for name, length in zip(names, lengths, strict=True):
        linear = getattr(owner, name)
        end = begin + length
        own = scales[begin // BLOCK : -(-end // BLOCK)] if has_blocks else scales[begin:end]
        stored = Fp8Weight(values[begin:end], own)
        _round(linear.weight.detach().to(device), stored, is_one=algo == "FP8")
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        setattr(owner, name, Fp8Linear(stored, bias).eval())
        begin = end


def _round(weight: Tensor, to: Fp8Weight, is_one: bool) -> None:
    """Fill in values and scales. `is_one`: one scale for all of it, repeated."""
    rows, columns = weight.shape
    if to.form is WeightForm.FP8_BLOCKS:
        padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
        to.scales.copy_(blocks.abs().amax((1, 3)).clamp(min=SMALLEST) / LARGEST)
        found = (blocks / to.scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    else:
        largest = weight.abs().amax() if is_one else weight.abs().amax(1)
        to.scales.copy_((largest.float().clamp(min=SMALLEST) / LARGEST).expand(rows))
        found = weight.float() / to.scales[:, None]
    to.values.copy_(found)
