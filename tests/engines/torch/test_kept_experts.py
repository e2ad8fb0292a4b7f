"""gpt-oss with experts that stay MXFP4: the same model as the dequantized one, on every path, and refused where not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.engines.torch import kernels
from bireme.engines.torch.forward.decoder_weights import fuse
from bireme.engines.torch.storage import Mxfp4Weight, WeightForm
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model, with_kept_experts
from bireme.engines.torch.weights.kept_experts import Mxfp4Experts
from bireme.engines.torch.weights.shared_weights import arrange, make_skeleton, weights_id
from tests.engines.torch import tiny_models
from tests.engines.torch.quantized_checkpoints import LAYOUTS, write
from tests.engines.torch.test_disaggregated import Pair
from tests.engines.torch.torch_harness import Harness, make_prompts, request

pytestmark = pytest.mark.usefixtures("few_programs")
CPU = torch.device("cpu")
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
SMALL |= {"intermediate_size": 32, "sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]}
ENGINE = {"max_seq_len": 24, "max_batch_size": 2, "tokens_per_block": 4}
PROMPTS = make_prompts(5, 9, seed=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folder, and transformers' model of the plain weights."""
    return write(tmp_path_factory.mktemp("model"), LAYOUTS["mxfp4"], "gpt_oss", **SMALL)


def opened(path, load_format="auto"):
    return with_kept_experts(open_checkpoint(path, load_format=load_format), "auto")


def test_what_stays_stands_for_the_plain_model_in_every_bit(written):
    path, expected = written
    checkpoint = opened(path)
    model = read_model(checkpoint, "float32", CPU)
    for layer, plain in zip(fuse(model, 24).layers, fuse(expected, 24).layers, strict=True):
        for own, other in ((layer.gate_up, plain.gate_up), (layer.down, plain.down)):
            assert isinstance(own, Mxfp4Weight)
            assert torch.equal(torch.stack([own.expert(index) for index in range(len(own))]), other)
        assert torch.equal(layer.mixture.gate_up_bias, plain.mixture.gate_up_bias)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)
    assert arrange(model) == arrange(make_skeleton(checkpoint, "float32"))
    plain = open_checkpoint(path)
    assert plain.digest == checkpoint.digest  # their KV is the same
    assert weights_id(plain, "float32", CPU) != weights_id(checkpoint, "float32", CPU)


def test_prefill_and_decode_on_kernels_answer_as_transformers(written, monkeypatch):
    path, expected = written
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    answers = tiny_models.generate(expected, PROMPTS, 4)
    with Pair(path, 4, 8, max_seq_len=24, max_batch_size=2) as pair:
        forward = pair.decode.core._parts.forward
        assert forward.form is WeightForm.MXFP4 and forward.resident is not None and forward.mixed is not None
        assert pair.run(PROMPTS, max_tokens=4) == answers
        again = [request(prompt, 4) for prompt in PROMPTS]  # both at once, behind blocks that are reused
        assert pair.decode.run(again) == answers


def test_random_weights_are_made_up_in_the_form_that_the_configuration_names(written, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    config = json.loads(Path(written[0], "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Harness(str(tmp_path), **ENGINE, load_format="dummy") as engine:
        forward = engine.core._parts.forward
        experts = forward.modules.layers[0].mlp.experts
        assert forward.form is WeightForm.MXFP4 and forward.resident is not None
        assert isinstance(experts, Mxfp4Experts) and len(experts.stored("down_proj")) == config["num_local_experts"]
        assert len(engine.run([request(PROMPTS[0], 3)])[0]) == 3


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [("float16", "torch.float16 has no decoder"), ("float32", "model.layers.1.mlp.experts.down_proj is stored")],
)
def test_what_does_not_stay_is_dequantized_and_the_log_says_why(tmp_path, caplog, dtype, reason):
    caplog.set_level("INFO")
    layout = LAYOUTS["mxfp4"]

    def chooses(name):
        return layout.chooses(name) and (dtype != "float32" or "1.mlp.experts.down_proj" not in name)

    path, expected = write(tmp_path, type(layout)(layout.config, layout.store, chooses), "gpt_oss", **SMALL)
    checkpoint = with_kept_experts(open_checkpoint(path), dtype)
    assert not checkpoint.keeps_experts and f"weights_not_kept reason={reason}" in caplog.text
    experts = read_model(checkpoint, "float32", CPU).model.layers[1].mlp.experts
    assert torch.equal(experts.down_proj, expected.model.layers[1].mlp.experts.down_proj)
