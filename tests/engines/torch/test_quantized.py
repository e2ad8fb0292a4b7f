"""Quantized checkpoints are dequantized at load: they equal the plain model they stand for, in weights and served."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from bireme.engines.torch.images.vision_tower import load_vision_tower
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from bireme.engines.torch.weights.quantized.methods import METHODS, form_named
from bireme.engines.torch.weights.shared_weights import weights_id
from tests.engines.torch import picture_models
from tests.engines.torch.quantized_checkpoints import LAYOUTS, Layout, rewrite, write
from tests.engines.torch.test_shared_weights import engine, service  # noqa: F401  (a fixture)
from tests.engines.torch.torch_harness import make_prompts, request

CPU = torch.device("cpu")
PROMPTS = make_prompts(3, 20, 45, 70)
REQUESTS = [request(prompt, 24) for prompt in PROMPTS]


WIDE = {"deepseek_v3": {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32}}  # groups of 32 divide them


def kind_of(layout):
    return "gpt_oss" if layout == "mxfp4" else "llama"


def read(path, dtype="float32"):
    return read_model(open_checkpoint(path), dtype, CPU)


def assert_equal(found, expected):
    """The models' weights are equal, bit by bit, under every name."""
    weights = dict(found.named_parameters(remove_duplicate=False))
    for name, weight in expected.named_parameters(remove_duplicate=False):
        assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_model_has_the_weights_that_its_layout_says(tmp_path, layout):
    path, expected = write(tmp_path, LAYOUTS[layout], kind_of(layout))
    assert_equal(read(path), expected)
    assert_equal(read(path, "bfloat16"), expected.bfloat16())


def test_every_method_is_in_a_layout():
    assert {layout.config["quant_method"] for layout in LAYOUTS.values()} == METHODS.keys()


@pytest.mark.parametrize("layout", ["fp8 in blocks", "gptq", "awq", "compressed int4"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_and_latent_attention_are_dequantized_too(tmp_path, kind, layout):
    def chooses(name):
        return name.endswith(".weight") and ("proj" in name or ".experts." in name)

    own = LAYOUTS[layout]
    path, expected = write(tmp_path, Layout(own.config, own.store, chooses), kind, **WIDE.get(kind, {}))
    assert_equal(read(path), expected)


def test_a_model_that_sees_has_its_language_model_dequantized_and_its_tower_is_read_alone(tmp_path):
    picture_models.llava(tmp_path / "plain")
    picture_models.llava(tmp_path / "quantized")
    stored, plain, layout = {}, {}, LAYOUTS["fbgemm"]
    for name, weight in load_file(tmp_path / "plain" / "model.safetensors").items():
        stored[name] = plain[name] = weight
        if "language_model" in name and name.endswith("proj.weight"):
            parts, plain[name] = layout.store(weight)
            stored |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
    rewrite(tmp_path / "plain", plain, None)
    rewrite(tmp_path / "quantized", stored, layout.config)
    path, expected = str(tmp_path / "quantized"), read(str(tmp_path / "plain"))
    assert len(stored) > len(plain)
    assert_equal(read(path), expected)
    tower = load_vision_tower(open_checkpoint(path), "float32", CPU)
    assert_equal(expected, tower)


def test_an_engine_that_maps_weights_dequantizes_nothing(tmp_path, service, caplog):  # noqa: F811
    caplog.set_level(logging.INFO)
    model = SimpleNamespace(path=write(tmp_path / "model", LAYOUTS["fbgemm"])[0])
    with engine(tmp_path, model) as first:
        expected = first.run(REQUESTS)
        with engine(tmp_path, model, "prefill") as second:
            assert second.run(REQUESTS) == expected
    assert caplog.text.count("weights_dequantized") == 1


def test_weights_of_another_stored_form_have_another_name(tmp_path):
    opened = [open_checkpoint(write(tmp_path / name, LAYOUTS[name])[0]) for name in ("fbgemm", "modelopt")]
    opened.append(open_checkpoint(str(tmp_path / "fbgemm" / "plain")))
    assert len({weights_id(checkpoint, "float32", CPU) for checkpoint in opened}) == 3


def test_the_log_tells_before_the_load_what_is_read_and_what_it_takes(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path, _ = write(tmp_path, LAYOUTS["modelopt"], vocab_size=512, hidden_size=1024, intermediate_size=2048)
    model = read(path)
    took = sum(parameter.numel() * 4 for parameter in model.parameters())
    stored = Path(path, "model.safetensors").stat().st_size
    assert f"read_mib={stored >> 20} model_mib={took >> 20} dtype=float32 ignored_scales=63" in caplog.text


def test_random_weights_of_a_quantized_model_are_plain_unless_a_form_is_chosen(tmp_path):
    path, plain = write(tmp_path, LAYOUTS["fbgemm"])
    Path(path, "model.safetensors").unlink()
    checkpoint = open_checkpoint(path, load_format="dummy")
    model = read_model(checkpoint, "float32", CPU)
    assert {name: weight.shape for name, weight in model.named_parameters()} == {
        name: weight.shape for name, weight in plain.named_parameters()
    }
    assert form_named(checkpoint.told).algo == "FP8_PER_CHANNEL_PER_TOKEN" and checkpoint.stored_as is None
