"""Has libraries quantize tiny models and transformers dequantize them: `python -m ... FOLDER`.

Of each case it leaves FOLDER/case/quantized, and what transformers makes of that in FOLDER/case/expected.safetensors.
A program of its own, because transformers needs accelerate for this, which engines import it without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engines.torch import tiny_models
from tests.engines.torch.quantized_checkpoints import LAYOUTS, Layout, write

SIZES = {"hidden_size": 128, "intermediate_size": 256}
# transformers takes the size of a block from the number of scales, so that blocks of 48 x 32 must divide all weights.
WHOLE_BLOCKS = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}


def written(layout: Layout, kind: str = "llama", **sizes: Any) -> Callable[[Path], tuple[str, Any]]:
    """Of a layout that no library writes on a CPU, and that transformers reads."""

    def make(folder: Path) -> tuple[str, Any]:
        from transformers import FineGrainedFP8Config, Mxfp4Config

        told = layout.config
        path, _ = write(folder, layout, kind, **sizes)
        if told["quant_method"] == "mxfp4":
            return path, Mxfp4Config(dequantize=True)
        given = {key: told.get(key) for key in ("weight_block_size", "modules_to_not_convert")}
        return path, FineGrainedFP8Config(**given, dequantize=True)

    return make


def compressed(kind: str = "llama", ignore: str = "lm_head", **weights: Any) -> Callable[[Path], tuple[str, Any]]:
    """By compressed-tensors, as llm-compressor does it: scales of the weights' extremes, then compressed.

    `ignore`: modules that stay plain beside the head.
    """

    def make(folder: Path) -> tuple[str, Any]:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
        from compressed_tensors.quantization.utils import calculate_qparams
        from transformers import CompressedTensorsConfig

        model = tiny_models.build(kind, **(tiny_models.SETTINGS[kind] | SIZES))
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        apply_quantization_config(
            model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", ignore])
        )
        for module in model.modules():
            own = getattr(module, "quantization_scheme", None)
            if own is None or own.weights is None:
                continue
            pieces = _pieces(module.weight.data, own.weights)
            scale, zero = calculate_qparams(pieces.amin(-1), pieces.amax(-1), own.weights)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        path = folder / "quantized"
        model.save_pretrained(path)
        compressor.update_config(path)
        return str(path), CompressedTensorsConfig(dequantize=True)

    return make


def bits_and_bytes(**settings: Any) -> Callable[[Path], tuple[str, Any]]:
    """By bitsandbytes, as transformers saves it."""

    def make(folder: Path) -> tuple[str, Any]:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        plain = tiny_models.save(folder / "plain", "llama", **SIZES)
        config = BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.float32)
        model.save_pretrained(folder / "quantized")
        return str(folder / "quantized"), None

    return make


def _pieces(weight: torch.Tensor, arguments: Any) -> torch.Tensor:
    """Return (..., values that share a scale)."""
    rows, columns = weight.shape
    if arguments.strategy == "tensor":
        return weight.reshape(1, -1)
    if arguments.strategy == "block":
        height, width = arguments.block_structure
        return weight.view(rows // height, height, columns // width, width).transpose(1, 2).flatten(2)
    return weight.view(rows, -1, arguments.group_size or columns)


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
INTEGER = {"type": "int", "symmetric": True}
ZEROS = {"type": "int", "symmetric": False}
ATTENTION = "re:.*self_attn.*"
MLPS = replace(
    LAYOUTS["fp8 whole"],
    config=LAYOUTS["fp8 whole"].config | {"modules_to_not_convert": ["self_attn", "lm_head"]},
    chooses=lambda name: "mlp" in name and "proj" in name,
)
CASES: dict[str, Callable[[Path], tuple[str, Any]]] = {
    "fp8 in blocks": written(LAYOUTS["fp8 in blocks"], **WHOLE_BLOCKS),
    "fp8 whole": written(LAYOUTS["fp8 whole"]),
    "fp8 whole, attention plain": written(MLPS, **SIZES),
    "mxfp4": written(LAYOUTS["mxfp4"], "gpt_oss"),
    "compressed fp8, tensor": compressed(**FLOAT, strategy="tensor"),
    "compressed fp8, channel": compressed(**FLOAT, strategy="channel"),
    "compressed fp8, channel, attention plain": compressed(**FLOAT, strategy="channel", ignore=ATTENTION),
    "compressed fp8, block": compressed(**FLOAT, strategy="block", block_structure=[16, 32]),
    "compressed int4, groups": compressed(**INTEGER, num_bits=4, strategy="group", group_size=32),
    "compressed int4, groups and zeros": compressed(**ZEROS, num_bits=4, strategy="group", group_size=32),
    "compressed int4, groups, attention plain": compressed(
        **INTEGER, num_bits=4, strategy="group", group_size=32, ignore=ATTENTION
    ),
    "compressed int4, channel": compressed(**INTEGER, num_bits=4, strategy="channel"),
    "compressed int8, channel": compressed(**INTEGER, num_bits=8, strategy="channel"),
    "compressed int8, tensor": compressed(**INTEGER, num_bits=8, strategy="tensor"),
    "bitsandbytes nf4": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes nf4, scales too": bits_and_bytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes fp4": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes int8": bits_and_bytes(load_in_8bit=True),
}
MODULES = {
    "compressed": "compressed_tensors",
    "bitsandbytes": "bitsandbytes",
}  # by a case's first word: what it needs beside transformers


def main(folder: Path, cases: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    for case in cases:
        path, config = CASES[case](folder / case)
        asked = {} if config is None else {"quantization_config": config}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **asked)
        if config is None:
            model = model.dequantize()
        with torch.device("meta"):  # some releases keep the scales of what they have dequantized
            own = {name for name, _ in type(model)(model.config).named_parameters(remove_duplicate=False)}
        found = model.named_parameters(remove_duplicate=False)
        weights = {name: weight.detach().clone().contiguous() for name, weight in found if name in own}
        save_file(weights, folder / case / "expected.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
