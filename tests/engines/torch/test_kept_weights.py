"""Quantized checkpoints whose weights stay as they are on a GPU: they stand for the same model, and decode as it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.config import EngineConfig, QuantConfig
from bireme.engines.torch import kernels
from bireme.engines.torch.forward import warmup
from bireme.engines.torch.forward.decoder_weights import fuse
from bireme.engines.torch.forward.weight_form import choose_form
from bireme.engines.torch.storage import WeightForm
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from bireme.engines.torch.weights.shared_weights import arrange, make_skeleton, weights_id
from bireme.engines.torch.weights.stored_linear import StoredLinear
from bireme.errors import ConfigError
from tests.engines.torch import quantized_checkpoints as checkpoints
from tests.engines.torch.quantized_checkpoints import LAYOUTS, Layout, write
from tests.engines.torch.test_disaggregated import Pair
from tests.engines.torch.torch_harness import Harness, make_prompts, request

CPU = torch.device("cpu")
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 256}
SMALL |= {"head_dim": 128, "intermediate_size": 256}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
OWN = {
    "fp8 in blocks of 128": Layout(BLOCKS, checkpoints.fp8_by_block(128, 128, "weight_scale_inv")),
    "awq, groups of 128": Layout({**LAYOUTS["awq"].config, "group_size": 128}, checkpoints.awq(128)),
}
INT4 = ("gptq", "gptq v2", "awq", "awq, groups of 128", "compressed int4")
KEPT = {
    "fp8 in blocks of 128": WeightForm.FP8_BLOCKS,
    **dict.fromkeys(("fp8 whole", "fbgemm", "modelopt"), WeightForm.FP8_CHANNEL),
    **dict.fromkeys(("compressed fp8, tensor", "compressed fp8, channel"), WeightForm.FP8_CHANNEL),
    **dict.fromkeys(INT4, WeightForm.INT4_GROUPS),
}


@pytest.fixture(autouse=True)
def usable(monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)


def written(folder, layout, **changes):
    return write(folder, OWN.get(layout) or LAYOUTS[layout], **(SMALL | changes))


def chosen(path, load_format="auto", **settings):
    return choose_form(open_checkpoint(path, load_format=load_format), EngineConfig(**settings), CPU)


@pytest.mark.parametrize("layout", KEPT)
def test_what_stays_stands_for_the_plain_model_in_every_bit(tmp_path, layout):
    path, expected = written(tmp_path, layout)
    checkpoint = chosen(path)
    model, own = read_model(checkpoint, "float32", CPU), dict(expected.named_modules())
    stored = {name: module for name, module in model.named_modules() if isinstance(module, StoredLinear)}
    assert len(stored) == 7 and checkpoint.stored_as.form is KEPT[layout]
    for name, module in stored.items():
        assert torch.equal(module.stored.dequantized(), own[name].weight), name
    ids = torch.tensor([[7]])
    with torch.inference_mode():  # of one row activations are taken as they are
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)
    assert arrange(model) == arrange(make_skeleton(checkpoint, "float32"))


@pytest.mark.parametrize("layout", ["fp8 whole", "awq"])
def test_parts_of_one_matrix_keep_their_own_scales_and_lie_in_one(tmp_path, layout):
    model = read_model(chosen(written(tmp_path, layout)[0]), "float32", CPU)
    layer, attention = fuse(model, 64).layers[0], model.model.layers[0].self_attn
    parts = [attention.q_proj.stored, attention.k_proj.stored, attention.v_proj.stored]
    assert layer.qkv.values.data_ptr() == parts[0].values.data_ptr()
    assert torch.equal(layer.qkv.dequantized(), torch.cat([part.dequantized() for part in parts]))
    if layout == "fp8 whole":
        assert layer.qkv.scales.unique_consecutive(return_counts=True)[1].tolist() == [256, 128, 128]


OTHERS = {
    "fp8 in blocks": "in a form that has no products here",
    "gptq, act-order": "has its inputs in act-order",
    "gptq, 8 bits, whole rows": "in a form that has no products here",
    "compressed int8": "in a form that has no products here",
    "nf4": "in a form that has no products here",
}


@pytest.mark.parametrize("layout", OTHERS)
def test_what_has_no_products_is_dequantized_and_the_log_says_why(tmp_path, caplog, layout):
    caplog.set_level(logging.INFO)
    path, _ = written(tmp_path, layout)
    assert chosen(path).digest == open_checkpoint(path).digest
    assert "weights_not_kept reason=model.layers.0.self_attn.q_proj.weight" in caplog.text
    assert OTHERS[layout] in caplog.text


def test_no_quant_or_a_part_of_each_matrix_plain_has_all_dequantized_and_a_dtype_does_not(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    own = LAYOUTS["fbgemm"]
    some = Layout(own.config, own.store, lambda name: name.endswith(("q_proj.weight", "up_proj.weight")))
    path, _ = write(tmp_path / "some", some, **SMALL)
    assert chosen(path).stored_as is None and "each matrix of its layers is plain, or a part of it is" in caplog.text
    path, _ = written(tmp_path / "all", "fbgemm")
    assert chosen(path, quant_config=QuantConfig(quant_algo="NO_QUANT")).stored_as is None
    assert chosen(path, dtype="bfloat16").digest == chosen(path).digest
    assert chosen(path, dtype="float16").stored_as is None and "dtype is float16" in caplog.text


def test_kept_and_dequantized_weights_are_two_models(tmp_path):
    path, _ = written(tmp_path, "awq")
    plain, kept = open_checkpoint(path), chosen(path)
    assert plain.digest != kept.digest
    assert len({weights_id(one, "float32", CPU) for one in (plain, kept)}) == 2


def test_quant_algo_may_say_what_the_checkpoint_is_and_nothing_else(tmp_path):
    path, _ = written(tmp_path, "awq")
    assert chosen(path, quant_config=QuantConfig(quant_algo="W4A16_AWQ")).digest == chosen(path).digest
    for algo in ("W4A16_GPTQ", "FP8"):
        with pytest.raises(ConfigError, match=f"quant_config.quant_algo: '{algo}'; the checkpoint is quantized"):
            chosen(path, quant_config=QuantConfig(quant_algo=algo))
    with pytest.raises(ConfigError, match="W4A16_AWQ.* are made with samples of text, and this checkpoint is plain"):
        chosen(str(tmp_path / "plain"), quant_config=QuantConfig(quant_algo="W4A16_AWQ"))


@pytest.mark.parametrize("layout", ["fp8 in blocks of 128", "modelopt", "gptq", "compressed int4"])
def test_made_up_weights_are_in_the_form_that_the_configuration_names(tmp_path, layout):
    path, _ = written(tmp_path, layout)
    (Path(path) / "model.safetensors").unlink()
    own = (OWN.get(layout) or LAYOUTS[layout]).config
    assert json.loads((Path(path) / "config.json").read_text())["quantization_config"] == own
    model = read_model(chosen(path, "dummy"), "float32", CPU)
    assert fuse(model, 64).form is KEPT[layout]
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


def test_made_up_weights_are_plain_where_nothing_multiplies_them(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    path, _ = written(tmp_path, "awq")
    monkeypatch.setattr(kernels, "is_usable", lambda device: False)
    assert chosen(path, "dummy").stored_as is None and "weights_are_plain named=W4A16_AWQ" in caplog.text
    algo = QuantConfig(quant_algo="W4A16_GPTQ")
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    assert chosen(str(tmp_path / "plain"), "dummy", quant_config=algo).stored_as.group == 128


@pytest.mark.usefixtures("few_programs")
def test_engines_of_4_bits_decode_as_their_reference_and_hand_kv_to_each_other(tmp_path, monkeypatch):
    path, _ = written(tmp_path, "awq, groups of 128")
    errors, compare = [], warmup._compare

    def watched(what, expected, found, most_error):
        right = expected.to(found.device).float()
        errors.append(float((found.float() - right).norm() / right.norm()))
        compare(what, expected, found, most_error)

    monkeypatch.setattr(warmup, "_compare", watched)
    settings = {"max_seq_len": 64, "max_batch_size": 2}
    prompts = make_prompts(20, 3, seed=1)
    with Harness(path, tokens_per_block=4, **settings) as alone:
        forward = alone.core._parts.forward
        assert forward.resident is not None and forward.form is WeightForm.INT4_GROUPS
        expected = alone.run([request(prompt, 3) for prompt in prompts])
    assert max(errors) < 0.001
    monkeypatch.setattr(warmup, "check_layers", lambda *given: None)
    with Pair(path, 8, 4, **settings) as pair:
        assert pair.run(prompts, max_tokens=3) == expected
        pair.assert_nothing_is_held()
