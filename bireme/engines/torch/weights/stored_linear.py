"""Weights of a model's layers in few bits: linear modules that hold them, and how a model gets these.

The projections of a layer that decoders read as one matrix lie in one, of which each module has its rows. They are
filled with what a checkpoint's file has (quantized/kept.py), or rounded from plain weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch.storage import (
    BLOCK,
    E4M3,
    LARGEST,
    PACKED,
    SMALLEST,
    Fp8Weight,
    Int4Weight,
    StoredAs,
    StoredWeight,
    WeightForm,
    packed,
    restored,
    rounded,
    rounds_activations,
)
from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines.torch")
JOINED = (("q_proj", "k_proj", "v_proj"), ("o_proj",)), (("gate_proj", "up_proj"), ("down_proj",))
_STEP = 16  # what torch's product divides both sides of a weight by
_SCALES = 16  # of an octave, that are tried for a row
_SEARCHED_ROWS = 2048  # at once: the search takes a few times their memory in float32
_NAMES = {"values": "weight", "scales": "weight_scale", "zeros": "weight_zero"}  # of a weight's tensors in its module
Fill = Callable[[str, Any, StoredWeight], None]  # a projection's name and module, and what is to be filled


class StoredLinear(torch.nn.Module):  # type: ignore[misc]
    """In the place of a torch.nn.Linear. It computes in float32 what products of this form do: their reference."""

    def __init__(self, stored: StoredWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = stored.shape
        for name, tensor in stored.tensors.items():
            self.register_buffer(_NAMES[name], tensor)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    @property
    def stored(self) -> StoredWeight:
        if hasattr(self, "weight_zero"):
            return Int4Weight(self.weight, self.weight_scale, self.weight_zero, self.in_features)
        return Fp8Weight(self.weight, self.weight_scale)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)."""
        weight, rows = self.stored, x.reshape(-1, x.shape[-1])
        taken = restored(*rounded(rows, weight.form)) if rounds_activations(weight.form, len(rows)) else rows.float()
        bias = None if self.bias is None else self.bias.float()
        return F.linear(taken, weight.dequantized(), bias).to(x.dtype).view(*x.shape[:-1], -1)


class EmptyLinear(torch.nn.Module):  # type: ignore[misc]
    """In the place of a torch.nn.Linear while a model is read whose projections are filled afterwards."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias


def projections(model: Any) -> Iterator[tuple[str, Any, Sequence[str]]]:
    """Yield the name and the module that own projections which are one matrix, and their names in it."""
    for index, layer in enumerate(model.get_submodule(model.base_model_prefix).layers):
        for part, groups in zip(("self_attn", "mlp"), JOINED, strict=True):
            for names in groups:
                yield f"{model.base_model_prefix}.layers.{index}.{part}", getattr(layer, part), names


def stored_projections(model: Any, plain: Collection[str]) -> Iterator[tuple[str, Any, Sequence[str]]]:
    """Yield those of `projections` that do not stay plain. `plain`: names of projections, all or none of a matrix."""
    for prefix, owner, names in projections(model):
        if f"{prefix}.{names[0]}" not in plain:
            yield prefix, owner, names


def empty_projections(model: Any, plain: Collection[str] = ()) -> None:
    """Have a model without places for its projections' weights, but for those that stay plain."""
    for _, owner, names in stored_projections(model, plain):
        for name in names:
            setattr(owner, name, EmptyLinear(getattr(owner, name)))


def store_projections(
    model: Any, like: StoredAs, device: torch.device, fill: Fill | None = None, plain: Collection[str] = ()
) -> None:
    """Put weights in few bits into the projections of a decoder's layers, one after the other, on `device`.

    `fill`: with what; None: the projections' own weights, rounded, each let go of before the next one's. `plain`: names
    of projections that stay as they are. Raises ConfigError.
    """
    if fault := fault_of_shapes(model, like, plain):
        raise ConfigError(
            f"quant_config.quant_algo: {like.algo}; {fault}; set FP8_PER_CHANNEL_PER_TOKEN, or remove it, or use"
            " engine: trtllm"
        )
    with torch.inference_mode(False), torch.no_grad():
        for prefix, owner, names in stored_projections(model, plain):
            _replace(prefix, owner, names, like, device, fill or _round_own(like))
    if device.type == "cuda" and fill is None:
        torch.cuda.empty_cache()  # what was rounded
        logger.info(
            "weights_rounded algo=%s mib=%d peak_mib=%d",
            like.algo,
            torch.cuda.memory_allocated(device) >> 20,
            torch.cuda.max_memory_allocated(device) >> 20,
        )


def why_not_dense(model: Any) -> str:
    """Return which projection a model's layers lack; empty: none."""
    for _, owner, names in projections(model):
        for name in names:
            if not isinstance(getattr(owner, name, None), torch.nn.Linear | EmptyLinear):
                return f"{name} is no linear projection here (of a mixture of experts)"
    return ""


def fault_of_shapes(model: Any, like: StoredAs, plain: Collection[str] = ()) -> str:
    """Return why no product of this form takes a projection that does not stay plain; empty: all are taken."""
    if fault := why_not_dense(model):
        return fault
    for _, owner, names in stored_projections(model, plain):
        for at, name in enumerate(names):
            linear = getattr(owner, name)
            rows, columns = linear.out_features, linear.in_features
            if like.form is WeightForm.INT4_GROUPS:
                if fault := _fault_of_group(columns, like.group):
                    return f"{name} is ({rows}, {columns}), {fault}"
                continue
            is_last = at + 1 == len(names) and "gate_proj" not in names
            step = BLOCK if like.form is WeightForm.FP8_BLOCKS and not is_last else _STEP
            if rows % step or columns % _STEP:
                return f"{name} is ({rows}, {columns}), whose rows do not divide by {step} or columns by {_STEP}"
    return ""


def _fault_of_group(columns: int, group: int) -> str:
    size = group or columns
    if columns % size or columns % _STEP:
        return f"whose columns do not divide by groups of {size} and by {_STEP}"
    is_taken = size == columns or size % PACKED == 0 or (PACKED % size == 0 and size >= _STEP)
    return "" if is_taken else f"and groups of {size} neither divide by {PACKED} nor divide it"


def _replace(prefix: str, owner: Any, names: Sequence[str], like: StoredAs, device: torch.device, fill: Fill) -> None:
    """Have these projections of the module share one matrix."""
    linears = [getattr(owner, name) for name in names]
    columns, begin = linears[0].in_features, 0
    whole = empty_weight(sum(linear.out_features for linear in linears), columns, like, device)
    for name, linear in zip(names, linears, strict=True):
        end = begin + linear.out_features
        own = whole.rows(begin, end)
        if device.type != "meta":
            fill(f"{prefix}.{name}", linear, own)
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        setattr(owner, name, StoredLinear(own, bias).eval())
        begin = end


def empty_weight(rows: int, columns: int, like: StoredAs, device: torch.device) -> StoredWeight:
    """Return a weight (rows, columns) that is still to be filled."""
    if like.form is WeightForm.INT4_GROUPS:
        groups = columns // (like.group or columns)
        values = torch.empty(rows, -(-columns // PACKED) * (PACKED // 2), dtype=torch.uint8, device=device)
        scales = torch.empty(rows, groups, dtype=like.scales, device=device)
        return Int4Weight(values, scales, torch.empty(rows, groups, dtype=torch.uint8, device=device), columns)
    shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if like.form is WeightForm.FP8_BLOCKS else (rows,)
    values = torch.empty(rows, columns, dtype=E4M3, device=device)
    return Fp8Weight(values, torch.empty(shape, dtype=torch.float32, device=device))


def _round_own(like: StoredAs) -> Fill:
    def fill(_: str, linear: Any, to: StoredWeight) -> None:
        round_into(linear.weight.detach().to(to.scales.device), to, like.algo == "FP8")

    return fill


def round_into(weight: Tensor, to: StoredWeight, is_one: bool = False) -> None:
    """Fill in what a plain weight (N, K) is rounded to. `is_one`: one scale for all of it, repeated."""
    rows, columns = weight.shape
    if isinstance(to, Int4Weight):
        groups = weight.float().view(rows, -1, to.group)
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        to.scales.copy_(((high - low) / 15).clamp(min=SMALLEST if to.scales.dtype is torch.float32 else 1e-6))
        scales = to.scales.float()
        to.zeros.copy_((-low / scales).round().clamp(0, 15))
        values = (groups / scales[..., None] + to.zeros[..., None].float()).round().clamp(0, 15)
        to.values.copy_(packed(values.view(rows, columns).to(torch.uint8)))
    elif to.form is WeightForm.FP8_BLOCKS:
        padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
        to.scales.copy_(blocks.abs().amax((1, 3)).clamp(min=SMALLEST) / LARGEST)
        to.values.copy_((blocks / to.scales[:, None, :, None]).view(padded.shape)[:rows, :columns])
    elif is_one:
        to.scales.copy_((weight.abs().amax().float().clamp(min=SMALLEST) / LARGEST).expand(rows))
        to.values.copy_(weight.float() / to.scales[:, None])
    else:
        for begin in range(0, rows, _SEARCHED_ROWS):
            own = slice(begin, begin + _SEARCHED_ROWS)
            some = weight[own].float()
            to.scales[own].copy_(_best_scales(some))
            to.values[own].copy_(some / to.scales[own, None])


def _best_scales(rows: Tensor) -> Tensor:
    """Return the scale (N,) that loses each row of (N, K) float32 the least squared error.

    Of scales that cut nothing off: an octave of them has all there is to choose, since E4M3's steps double with each.
    """
    least = rows.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    best, lowest = least, torch.full_like(least, torch.inf)
    for step in range(_SCALES):
        scales = least * 2 ** (step / _SCALES)
        errors = ((rows / scales).to(E4M3).float() * scales - rows).square().sum(1, keepdim=True)
        best, lowest = torch.where(errors < lowest, scales, best), torch.minimum(lowest, errors)
    return best[:, 0]
