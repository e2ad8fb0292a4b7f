"""Tiny checkpoints in the layouts that quantizing libraries publish, and the plain models that they stand for.

Written here from the layouts' descriptions, apart from the reader: each `Layout` makes the stored tensors of one weight
and the plain weight by the same formula, from the quantized values that it holds itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engines.torch import tiny_models

Stored = dict[str, Tensor]  # by what follows the module's name


@dataclass(frozen=True)
class Layout:
    """`store`: of a weight (outputs, inputs), or of experts as the model has them, its stored and its plain form."""

    config: dict[str, Any]
    store: Callable[[Tensor], tuple[Stored, Tensor]]
    chooses: Callable[[str], bool] = lambda name: "proj" in name and name.endswith(".weight")
    others: dict[str, Tensor] = field(default_factory=dict)  # activations' and KV's scales, by what the name ends with


def write(folder: Path, layout: Layout, model_type: str = "llama", **changes: Any) -> tuple[str, Any]:
    """Return the folder of a quantized tiny model, and transformers' model of its plain weights in float32."""
    from transformers import AutoModelForCausalLM

    tiny_models.save(folder / "plain", model_type, **(tiny_models.SETTINGS[model_type] | changes))
    tiny_models.save(folder / "quantized", model_type, **(tiny_models.SETTINGS[model_type] | changes))
    stored, plain = {}, {}
    for name, weight in load_file(folder / "plain" / "model.safetensors").items():
        if not layout.chooses(name):
            stored[name] = plain[name] = weight
            continue
        parts, plain[name] = layout.store(weight)
        module = name.removesuffix(".weight")
        stored |= {f"{module}{'' if end.startswith('_') else '.'}{end}": part for end, part in parts.items()}
        stored |= {f"{module}.{end}": scale.clone() for end, scale in layout.others.items()}
    rewrite(folder / "plain", plain, None)
    rewrite(folder / "quantized", stored, layout.config)
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()
    return str(folder / "quantized"), model


def rewrite(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> None:
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def _e4m3(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and what they and their scale, of the same shape as the weight, stand for."""
    values = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, values.double().mul(scale.double()).float()


def fp8_by_block(height: int, width: int, scale_name: str) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = weight.shape
        scales = torch.tensor(
            [
                [weight[i : i + height, j : j + width].abs().max() / 448 for j in range(0, columns, width)]
                for i in range(0, rows, height)
            ]
        )
        row, column = torch.arange(rows) // height, torch.arange(columns) // width
        values, plain = _e4m3(weight, scales[row][:, column])
        return {"weight": values, scale_name: scales}, plain

    return store


def fp8_by_row(weight: Tensor) -> tuple[Stored, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values, plain = _e4m3(weight, scales)
    return {"weight": values, "weight_scale": scales}, plain


def fp8_whole(scale_name: str, shape: tuple[int, ...] = ()) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        scale = weight.abs().max() / 448
        values, plain = _e4m3(weight, scale)
        return {"weight": values, scale_name: scale.reshape(shape)}, plain

    return store


def mxfp4(weight: Tensor) -> tuple[Stored, Tensor]:
    """Experts as the model has them, (experts, inputs, outputs), to gpt-oss' blocks."""
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - steps).abs().argmin(-1)
    plain = steps[codes] * scaled.sign() * exponents.exp2()[..., None]
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}, plain.flatten(-2).transpose(1, 2)


def _words(values: Tensor, bits: int) -> Tensor:
    """Pack the last dimension of integers into int32, the first value in the lowest bits."""
    each = 32 // bits
    grouped = values.long().unflatten(-1, (-1, each)) << (bits * torch.arange(each))
    return grouped.sum(-1).to(torch.int32)  # wraps where the highest bit is set


def _integers(weight: Tensor, bits: int, group_of: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values (outputs, inputs), scales and zeros (outputs, groups), and the plain weight."""
    most, count = (1 << bits) - 1, int(group_of.max()) + 1
    low = torch.stack([weight[:, group_of == group].amin(1).clamp(max=0) for group in range(count)], 1)
    high = torch.stack([weight[:, group_of == group].amax(1).clamp(min=0) for group in range(count)], 1)
    scales = ((high - low) / most).half()
    zeros = (-low / scales).round().clamp(0, most)
    own_scales, own_zeros = scales[:, group_of].float(), zeros[:, group_of]
    values = (weight / own_scales + own_zeros).round().clamp(0, most)
    return values, scales, zeros, (values - own_zeros) * own_scales


def gptq(bits: int, size: int, version: int = 1, is_mixed: bool = False) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """AutoGPTQ's QuantLinear.pack: inputs along words, zeros less 1 in its first format."""

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // (size if size > 0 else inputs)
        if is_mixed:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
        values, scales, zeros, plain = _integers(weight, bits, groups)
        stored = {
            "qweight": _words(values, bits).T.contiguous(),
            "qzeros": _words(((zeros - int(version == 1)) % (1 << bits)).T, bits),
            "scales": scales.T,
            "g_idx": groups.int(),
        }
        return stored, plain

    return store


def awq(size: int) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """AutoAWQ's WQLinear_GEMM.from_linear: outputs along words, in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    def pack(values: Tensor) -> Tensor:
        ordered = values.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return _words(ordered.flatten(-2), 4)

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        values, scales, zeros, plain = _integers(weight, 4, torch.arange(weight.shape[1]) // size)
        return {"qweight": pack(values.T), "qzeros": pack(zeros.T), "scales": scales.T.contiguous()}, plain

    return store


def compressed_words(bits: int, size: int, is_mixed: bool = False) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """compressed-tensors' pack-quantized with zero points, which lie along the outputs, and its activation order."""

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        groups = torch.arange(weight.shape[1]) // size
        if is_mixed:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(3))]
        values, scales, zeros, plain = _integers(weight, bits, groups)
        stored = {"weight_packed": _words(values, bits), "weight_scale": scales}
        stored |= {"weight_zero_point": _words(zeros.T, bits).T, "weight_shape": torch.tensor(weight.shape)}
        return stored | ({"weight_g_idx": groups.int()} if is_mixed else {}), plain

    return store


def int8_by_row(weight: Tensor) -> tuple[Stored, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scales.float()).round().clamp(-127, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales.float()


# The quantiles of a normal distribution between -1 and 1 (QLoRA, appendix E).
_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def nf4(weight: Tensor) -> tuple[Stored, Tensor]:
    """bitsandbytes' blocks of 64 values, two to a byte, the first in the high half."""
    table, blocks = torch.tensor(_NF4), weight.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    codes = ((blocks / largest[:, None])[..., None] - table).abs().argmin(-1)
    plain = (table[codes] * largest[:, None]).view(weight.shape)
    pairs = codes.view(-1, 2).to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    stored = {"weight": (pairs[:, :1] << 4) | pairs[:, 1:], "weight.absmax": largest, "weight.quant_map": table}
    told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return stored | {"weight.quant_state.bitsandbytes__nf4": told}, plain


def llm_int8(weight: Tensor) -> tuple[Stored, Tensor]:
    largest = weight.abs().amax(1)
    values = (weight * (127 / largest[:, None])).round()
    stored = {"weight": values.to(torch.int8), "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return stored, values * largest[:, None] * torch.tensor(1 / 127)


_STATIC = {"input_scale": torch.tensor(0.5)}


def _compressed(weights: dict[str, Any], form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "type": "int"} | weights, "input_activations": None}
    told = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return told | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _floats(**weights: Any) -> dict[str, Any]:
    return _compressed({"num_bits": 8, "type": "float"} | weights, "float-quantized")


def _packed(bits: int, size: int) -> dict[str, Any]:
    arguments = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": size}
    return _compressed(arguments, "pack-quantized")


def _gptq_config(bits: int, size: int, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, "sym": False} | settings


_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
LAYOUTS: dict[str, Layout] = {
    "fp8 in blocks": Layout(
        {"quant_method": "fp8", "weight_block_size": [48, 32], "activation_scheme": "dynamic"},
        fp8_by_block(48, 32, "weight_scale_inv"),
    ),
    "fp8 whole": Layout(
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        fp8_whole("weight_scale_inv"),
        others={"activation_scale": torch.tensor(0.5)},
    ),
    "fbgemm": Layout({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_by_row),
    "modelopt": Layout(
        _MODELOPT, fp8_whole("weight_scale"), others=_STATIC | {"k_scale": torch.ones(()), "v_scale": torch.ones(())}
    ),
    "compressed fp8, tensor": Layout(_floats(strategy="tensor"), fp8_whole("weight_scale", (1,)), others=_STATIC),
    "compressed fp8, channel": Layout(_floats(strategy="channel"), fp8_by_row),
    "compressed fp8, block": Layout(
        _floats(strategy="block", block_structure=[16, 32]), fp8_by_block(16, 32, "weight_scale")
    ),
    "mxfp4": Layout(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        mxfp4,
        lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")),
    ),
    "gptq": Layout(_gptq_config(4, 32), gptq(4, 32)),
    "gptq, act-order": Layout(_gptq_config(4, 16, desc_act=True), gptq(4, 16, is_mixed=True)),
    "gptq, 8 bits, whole rows": Layout(_gptq_config(8, -1), gptq(8, -1)),
    "gptq v2": Layout(_gptq_config(4, 32, checkpoint_format="gptq_v2"), gptq(4, 32, version=2)),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq(32)),
    "compressed int4": Layout(_packed(4, 32), compressed_words(4, 32)),
    "compressed int8 in words, act-order": Layout(_packed(8, 16), compressed_words(8, 16, is_mixed=True)),
    "compressed int8": Layout(_compressed({"num_bits": 8, "strategy": "channel"}, "int-quantized"), int8_by_row),
    "nf4": Layout({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "bitsandbytes int8": Layout({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
}
