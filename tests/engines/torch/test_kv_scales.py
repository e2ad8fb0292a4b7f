"""Scales of a KV cache in 8 bits are read by the names of those who publish them, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bireme.engines.torch.geometry import KvScales
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from bireme.engines.torch.weights.kv_scales import read_kv_scales
from bireme.engines.torch.weights.quantized.methods import form_named
from bireme.errors import ConfigError
from tests.engines.torch import tiny_models
from tests.engines.torch.torch_harness import Harness, request

ATTENTION = "model.layers.{}.self_attn."
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
BOTH = {"k_scale": (0.5, 0.25), "v_scale": (2.0, 1.0)}  # a layer each


@pytest.fixture
def with_scales(tmp_path):
    """Return a checkpoint whose files hold these as well."""
    tiny_models.save(tmp_path, "llama", num_hidden_layers=2, hidden_size=32)

    def make(scales, shape=(1,), dtype=torch.float32, told=None):
        tensors = load_file(tmp_path / "model.safetensors")
        for name, values in scales.items():
            for layer, value in enumerate(values):
                tensors[ATTENTION.format(layer) + name] = torch.full(shape, value, dtype=dtype)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return replace(open_checkpoint(str(tmp_path)), told=told)

    return make


@pytest.mark.parametrize(
    ("names", "shape", "dtype", "told"),
    [
        (("k_scale", "v_scale"), (1,), torch.bfloat16, {"kv_cache_scheme": SCHEME}),
        (("k_proj.k_scale", "v_proj.v_scale"), (), torch.float32, {"kv_cache_quant_algo": "FP8"}),
        (("k_proj.k_scale", "v_proj.v_scale"), (), torch.float32, {"kv_cache_scheme": SCHEME | {"strategy": None}}),
        (("k_proj.output_scale", "v_proj.output_scale"), (1,), torch.float32, None),
    ],
)
def test_a_layers_scales_are_found_by_the_names_of_published_checkpoints(with_scales, names, shape, dtype, told):
    checkpoint = with_scales(dict(zip(names, BOTH.values(), strict=True)), shape, dtype, told)
    assert read_kv_scales(checkpoint) == (KvScales(0.5, 2.0), KvScales(0.25, 1.0))


def test_a_scale_may_be_of_both(with_scales):
    assert read_kv_scales(with_scales({"kv_scale": (0.5, 0.25)})) == (KvScales(0.5, 0.5), KvScales(0.25, 0.25))


def test_without_any_they_are_one_which_is_said(with_scales, caplog):
    assert read_kv_scales(with_scales({})) == (KvScales(), KvScales())
    assert [line.getMessage().split(" reason")[0] for line in caplog.records] == [
        "kv_scales source=none keys=1.0 values=1.0"
    ]


@pytest.mark.parametrize(
    ("scales", "settings", "reason"),
    [
        ({"k_scale": (0.5, 0.5)}, {}, "none of the values of layer 0"),
        (BOTH | {"k_scale": (0.5,)}, {}, "none of the keys of layer 1"),
        (BOTH | {"v_scale": (0.5, float("nan"))}, {}, r"layers.1.self_attn.v_scale is nan; a positive number"),
        (BOTH | {"k_scale": (0.0, 0.5)}, {}, r"layers.0.self_attn.k_scale is 0.0; a positive number"),
        (BOTH | {"kv_scale": (0.5, 0.5)}, {}, r"kv_scale and .*k_scale are both scales of layer 0"),
        (BOTH, {"shape": (2, 1, 1)}, r"k_scale is F32 \[2, 1, 1\]; one number is read"),
        (BOTH, {"dtype": torch.int8}, r"k_scale is I8 \[1\]; one number is read"),
        (BOTH, {"told": {"kv_cache_quant_algo": "NVFP4"}}, "kv_cache_quant_algo: 'NVFP4'"),
        (BOTH, {"told": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}, "kv_cache_scheme: int of 8 bits"),
        (BOTH, {"told": {"kv_cache_scheme": {"strategy": "attn_head"}}}, "kv_cache_scheme: .*strategy attn_head"),
        (BOTH, {"told": {"kv_cache_scheme": {"dynamic": True}}}, "kv_cache_scheme: .*dynamic True"),
        (BOTH, {"told": {"kv_cache_scheme": "fp8"}}, "kv_cache_scheme"),
    ],
)
def test_what_is_wrong_with_them_is_refused_by_name(with_scales, scales, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        read_kv_scales(with_scales(scales, **settings))


def test_a_checkpoint_with_scales_loads_as_without(with_scales):
    model = read_model(with_scales(BOTH), "float32", torch.device("cpu"))
    assert torch.isfinite(model(torch.arange(10)[None]).logits).all()


COMPRESSED = {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen"}
OF_KV_ALONE = {
    "no group": COMPRESSED | {"config_groups": {}, "kv_cache_scheme": SCHEME},
    "a group of outputs": COMPRESSED
    | {"config_groups": {"group_0": {"targets": ["re:.*k_proj"], "weights": None}}, "kv_cache_scheme": SCHEME},
    "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
}


@pytest.mark.parametrize("told", OF_KV_ALONE)
def test_a_checkpoint_that_quantizes_kv_alone_is_served_plain_and_its_scales_are_read(with_scales, tmp_path, told):
    with_scales(BOTH)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": OF_KV_ALONE[told]}))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.quantization is None and form_named(checkpoint.told) is None
    assert read_kv_scales(checkpoint) == (KvScales(0.5, 2.0), KvScales(0.25, 1.0))
    model = read_model(checkpoint, "float32", torch.device("cpu"))
    assert torch.equal(model.lm_head.weight, load_file(tmp_path / "model.safetensors")["lm_head.weight"])
    with Harness(str(tmp_path), tokens_per_block=8) as engine:
        assert len(engine.run([request([5, 6, 7], 3)])[0]) == 3


def test_neither_weights_nor_kv_in_a_scheme_is_refused_by_name(with_scales, tmp_path):
    with_scales({})
    config = json.loads((tmp_path / "config.json").read_text())
    told = COMPRESSED | {"config_groups": {}, "quantization_status": "compressed"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    with pytest.raises(ConfigError, match="quantization_config.config_groups: none; groups say"):
        open_checkpoint(str(tmp_path))
