"""Quantized checkpoints that can't be read are refused by name, from the heads of their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from bireme.errors import ConfigError
from tests.engines.torch.quantized_checkpoints import LAYOUTS, rewrite, write

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
STATE = ".quant_state.bitsandbytes__nf4"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def without(name):
    return lambda tensors, config: tensors.pop(name)


def with_tensor(name, change):
    def edit(tensors, config):
        tensors[name] = change(tensors[name])

    return edit


def with_setting(**settings):
    return lambda tensors, config: config.update(settings)


def with_weights(**settings):
    return lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(settings)


def with_value(name, value):
    return with_tensor(name, lambda tensor: torch.full_like(tensor, value))


def two_schemes(tensors, config):
    first = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = first | {"weights": first["weights"] | {"strategy": "tensor"}}


FAULTS = {
    "an unknown method": ("fbgemm", with_setting(quant_method="aqlm"), "quantized .aqlm.; the torch engine reads fp8"),
    "no scale": ("fbgemm", without(f"{Q}.weight_scale"), f"{Q}.weight_scale is missing"),
    "no weight": ("fbgemm", without(f"{Q}.weight"), f"{Q}.weight_scale: there is no weight"),
    "a scale of another shape": (
        "fbgemm",
        with_tensor(f"{Q}.weight_scale", lambda scale: scale[:5]),
        r"weight_scale has the shape \[5, 1\], and a scale for each channel of \[64, 64\] asks for \[64, 1\] or \[64\]",
    ),
    "a scale of another type": (
        "fbgemm",
        with_tensor(f"{Q}.weight_scale", torch.Tensor.int),
        "is stored as I32; F32 or BF16",
    ),
    "blocks of another size": ("fp8 in blocks", with_setting(weight_block_size=[32, 32]), "block of 32 x 32"),
    "blocks that are no sizes": ("fp8 in blocks", with_setting(weight_block_size=[0, 32]), r"weight_block_size: \[0"),
    "a setting of another type": ("fp8 in blocks", with_setting(weight_block_size="big"), "weight_block_size: 'big'"),
    "another FP8": ("fp8 whole", with_setting(fmt="e5m2"), "fmt: 'e5m2'; e4m3 is read"),
    "another algorithm": ("modelopt", with_setting(quant_algo="NVFP4"), "modelopt NVFP4: the torch engine reads"),
    "two methods": (
        "modelopt",
        with_tensor("lm_head.weight", lambda weight: weight.to(torch.int8)),
        "lm_head.weight is stored as I8, which is no part of what modelopt says",
    ),
    "two schemes": ("compressed fp8, channel", two_schemes, "group_0, group_1 store weights in 2 ways"),
    "a format of another kind": (
        "compressed fp8, channel",
        with_setting(format="nvfp4-pack-quantized"),
        "'nvfp4-pack-quantized' is not read; the torch engine reads float-quantized",
    ),
    "a strategy of another kind": ("compressed fp8, channel", with_weights(strategy="group"), "strategy group"),
    "weights that were not compressed": (
        "compressed fp8, channel",
        with_setting(quantization_status="frozen"),
        "save_compressed=True",
    ),
    "sparse weights": (
        "compressed fp8, channel",
        with_setting(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparse and rotated",
    ),
    "nothing quantized": (
        "fbgemm",
        lambda tensors, config: (
            [
                tensors.update({name: tensors[name].float()} if name.endswith("weight") else {}) or ()
                for name in list(tensors)
            ]
            and [tensors.pop(name) for name in list(tensors) if name.endswith("_scale")]
        ),
        "no weight of the files is stored so",
    ),
    "no scales of MXFP4": ("mxfp4", without(f"{EXPERTS}_scales"), f"{EXPERTS}_scales is missing"),
    "no blocks of MXFP4": ("mxfp4", without(f"{EXPERTS}_blocks"), "there are no blocks for it"),
    "blocks of half a group": (
        "mxfp4",
        with_tensor(f"{EXPERTS}_blocks", lambda part: part[..., :8]),
        "rows, groups, 16",
    ),
    "scales of half the groups": (
        "mxfp4",
        with_tensor(f"{EXPERTS}_scales", lambda part: part[..., :1]),
        "an exponent for each group",
    ),
    "bits that GPTQ's words do not have": (
        "gptq",
        with_setting(bits=8),
        f"{DOWN}.scales has the shape .4, 64., and 8 bits",
    ),
    "groups that the scales do not have": ("gptq", with_setting(group_size=16), "groups of 16 of 128 inputs asks for"),
    "groups that do not divide": ("gptq", with_setting(group_size=48), "group size 48 does not divide its 128 inputs"),
    "no groups": ("gptq", with_setting(group_size=0), "group size 0 does not divide"),
    "bits of another kind": ("gptq", with_setting(bits=3), "GPTQ of 3 bits, 'gptq'; 4 and 8 bits"),
    "a format of GPTQ that is not read": ("gptq", with_setting(checkpoint_format="marlin"), "4 bits, 'marlin'"),
    "modules of other bits": (
        "gptq",
        with_setting(dynamic={"-:lm_head": {}, "+:.*down": {"bits": 8}}),
        "down' has weights",
    ),
    "no order of activations": (
        "gptq, act-order",
        without(f"{Q}.g_idx"),
        f"{Q}.g_idx is missing: {Q}.qweight can't be read without it",
    ),
    "no zeros of GPTQ": ("gptq", without(f"{Q}.qzeros"), f"{Q}.qzeros is missing"),
    "zeros of another shape": (
        "gptq",
        with_tensor(f"{Q}.qzeros", lambda part: part[:, :4]),
        f"{Q}.qzeros has the shape",
    ),
    "zeros without a weight": ("gptq", without(f"{Q}.qweight"), "is stored as I32, which is no part of what gptq says"),
    "another layout of AWQ": ("awq", with_setting(version="gemv"), "AWQ of 4 bits, version 'gemv'"),
    "AWQ's groups": ("awq", with_setting(group_size=64), f"{DOWN}.scales has the shape"),
    "packed words of other bits": ("compressed int4", with_weights(num_bits=8), f"{DOWN}.weight_scale has the shape"),
    "packed words of bits that are not read": ("compressed int4", with_weights(num_bits=3), "integers of 3 bits"),
    "zeros that are not there": (
        "compressed int8",
        with_weights(symmetric=False),
        f"{DOWN}.weight_zero_point is missing",
    ),
    "no shape of packed words": ("compressed int4", without(f"{Q}.weight_shape"), f"{Q}.weight_shape is missing"),
    "no scales of blocks": ("nf4", without(f"{Q}.weight.absmax"), f"{Q}.weight.absmax is missing"),
    "no state of blocks": ("nf4", without(f"{Q}.weight{STATE}"), f"{Q}.weight is stored as U8, which is no part"),
    "a state that is no JSON": ("nf4", with_value(f"{Q}.weight{STATE}", 7), "bitsandbytes__nf4 can't be read"),
    "blocks of another weight": (
        "nf4",
        with_tensor(f"{Q}.weight", lambda part: part[:100]),
        f"{Q}.weight has the shape .100, 1., and .64, 64. in blocks of 64 asks for",
    ),
    "no scales of rows": ("bitsandbytes int8", without(f"{Q}.SCB"), f"{Q}.SCB is missing"),
    "neither 4 nor 8 bits": ("nf4", with_setting(load_in_4bit=False), "one of load_in_4bit and load_in_8bit"),
    "blocks stored as another type": (
        "nf4",
        with_setting(bnb_4bit_quant_storage="bfloat16"),
        "'bfloat16'; uint8 is read",
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that gives a layout's folder; made once."""
    made = {}

    def get(layout):
        if layout not in made:
            kind = "gpt_oss" if layout == "mxfp4" else "llama"
            made[layout] = Path(write(tmp_path_factory.mktemp("quantized"), LAYOUTS[layout], kind)[0])
        return made[layout]

    return get


def edited(folder, copy, edit):
    config = json.loads((folder / "config.json").read_text())
    tensors, quantization = load_file(folder / "model.safetensors"), config["quantization_config"]
    edit(tensors, quantization)
    copy.mkdir(exist_ok=True)
    (copy / "config.json").write_text(json.dumps(config))
    rewrite(copy, tensors, quantization)
    return str(copy)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_files_do_not_say_is_refused_before_any_data_is_read(written, tmp_path, fault):
    layout, edit, text = FAULTS[fault]
    with pytest.raises(ConfigError, match=text):
        open_checkpoint(edited(written(layout), tmp_path, edit))


VALUES = {
    "NaN": ("fbgemm", with_value(f"{Q}.weight_scale", float("nan")), f"{Q}.weight_scale: it holds NaN or inf"),
    "inf": ("fp8 in blocks", with_value(f"{Q}.weight_scale_inv", float("inf")), "it holds NaN or inf"),
    "an exponent that is NaN": ("mxfp4", with_value(f"{EXPERTS}_scales", 255), f"{EXPERTS}: a scale is NaN"),
    "a group that is not there": (
        "gptq, act-order",
        with_value(f"{Q}.g_idx", 9),
        "of the groups 9 to 9, and there are 4",
    ),
    "a shape that the words do not have": ("compressed int4", with_value(f"{Q}.weight_shape", 48), r"says \[48, 48\]"),
    "a scale of a block": ("nf4", with_value(f"{Q}.weight.absmax", float("inf")), f"{Q}.weight.absmax: it holds NaN"),
    "a layout of int8": ("bitsandbytes int8", with_value(f"{Q}.weight_format", 2), "its weight_format is 2"),
}


@pytest.mark.parametrize("fault", VALUES)
def test_scales_that_are_no_numbers_are_refused_before_the_model_is_made(written, tmp_path, fault):
    layout, edit, text = VALUES[fault]
    checkpoint = open_checkpoint(edited(written(layout), tmp_path, edit))
    with pytest.raises(ConfigError, match=text):
        checkpoint.quantization.open(torch.float32)
    with pytest.raises(ConfigError, match=text):
        read_model(checkpoint, "float32", torch.device("cpu"))


def test_a_file_cut_short_is_refused(written, tmp_path):
    path = edited(written("fbgemm"), tmp_path, lambda tensors, config: None)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="model.safetensors is corrupted"):
        open_checkpoint(path)


def test_fp8_weights_without_a_quantization_config_are_refused(written, tmp_path):
    path = edited(written("fbgemm"), tmp_path, lambda tensors, config: None)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="F8_E4M3, and config.json has no quantization_config"):
        open_checkpoint(path)


def test_modelopts_own_file_says_what_the_configuration_does_not(written, tmp_path):
    path = edited(written("modelopt"), tmp_path, lambda tensors, config: None)
    config = json.loads((tmp_path / "config.json").read_text())
    told = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": told["quant_algo"]}}))
    opened = open_checkpoint(path)
    assert opened.quantization.method == "modelopt"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ConfigError, match="modelopt NVFP4"):
        open_checkpoint(path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": ["FP8"]}))
    with pytest.raises(ConfigError, match="hf_quant_config.json: quantization is list; a JSON object is expected"):
        open_checkpoint(path)
