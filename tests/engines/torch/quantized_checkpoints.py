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


_STATIC = {"input_scale": torch.tensor(0.5)}


def _compressed(weights: dict[str, Any], form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True} | weights, "input_activations": None}
    told = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return told | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _floats(**weights: Any) -> dict[str, Any]:
    return _compressed({"num_bits": 8, "type": "float"} | weights, "float-quantized")


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
}
