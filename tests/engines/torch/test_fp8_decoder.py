"""Weights that stay 8-bit floats: the fused decoder computes what their reference does, or they are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.config import EngineConfig, QuantConfig
from bireme.engines.torch import kernels
from bireme.engines.torch.forward import warmup, weight_form
from bireme.engines.torch.forward.decoder_weights import fuse
from bireme.engines.torch.forward.weight_form import choose_form
from bireme.engines.torch.storage import StoredAs, WeightForm
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model, stored_as
from bireme.engines.torch.weights.quantized.methods import Quantization
from bireme.engines.torch.weights.shared_weights import arrange, make_skeleton, put_in, weights_id
from bireme.engines.torch.weights.stored_linear import StoredLinear
from bireme.errors import ConfigError
from tests.engines.torch import tiny_models
from tests.engines.torch.torch_harness import Harness, make_prompts, request

pytestmark = pytest.mark.usefixtures("few_programs")
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128}
SMALL |= {"head_dim": 128, "intermediate_size": 128}
ENGINE = {"max_seq_len": 64, "max_batch_size": 2, "tokens_per_block": 4}
ALGOS = {
    "FP8": WeightForm.FP8_CHANNEL,
    "FP8_PER_CHANNEL_PER_TOKEN": WeightForm.FP8_CHANNEL,
    "FP8_BLOCK_SCALES": WeightForm.FP8_BLOCKS,
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_models.save(tmp_path_factory.mktemp("model"), "mistral", **SMALL)


def asks(algo):
    return {"quant_config": QuantConfig(quant_algo=algo)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 keeps no 8-bit floats on a GPU")
@pytest.mark.parametrize("algo", list(ALGOS)[1:])
def test_an_engine_answers_as_its_reference_does(path, monkeypatch, algo):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    compared = []
    compare = warmup._compare

    def watched(what, expected, found, most_error):
        compare(what, expected, found, most_error)
        compared.append((what, float((found.float() - expected.float()).norm() / expected.float().norm())))

    monkeypatch.setattr(warmup, "_compare", watched)
    with Harness(path, **ENGINE, **asks(algo)) as engine:
        forward = engine.core._parts.forward
        assert forward.resident is not None and forward.resident.decoder.weights.form is ALGOS[algo]
        tokens = engine.run([request(prompt, 4) for prompt in make_prompts(20, 3, seed=1)])
    assert [len(one) for one in tokens] == [4, 4]
    layer = [f"{part} of layer 0, {rows} rows," for rows in (1, 4, 40) for part in ("QKV", "output", "MLP")]
    layer += [f"{part} of layer 1, 40 rows," for part in ("QKV", "output", "MLP")]
    steps = ("prompt", "decode step", "mixed prompt of 40", "mixed decode step after 40")
    told = [*layer, *(f"logits of a {what}" for what in steps)]
    assert [what.rpartition(" ")[0] for what, _ in compared] == told
    assert max(error for _, error in compared) < 0.02


def test_what_is_rounded_is_another_model_and_can_be_shared(path):
    checkpoint = open_checkpoint(path)
    made = {algo: stored_as(checkpoint, StoredAs(algo)) for algo in ALGOS}
    digests = {checkpoint.digest, *(one.digest for one in made.values())}
    ids = {weights_id(one, "float32", CPU) for one in (checkpoint, *made.values())}
    assert len(digests) == len(ids) == 4
    own = made["FP8_BLOCK_SCALES"]
    model, skeleton = read_model(own, "float32", CPU), make_skeleton(own, "float32")
    table, num_bytes = arrange(model)
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for one in table:
        source = tensors[one.names[0]].detach().contiguous().reshape(-1)
        memory[one.begin : one.begin + one.num_bytes].view(source.dtype).copy_(source)
    put_in(skeleton, table, memory)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(skeleton(ids).logits, model(ids).logits)
    layer = fuse(skeleton, 64).layers[0]
    assert layer.qkv.values.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def test_what_was_rounded_before_is_not_rounded_again(path):
    quantized = replace(open_checkpoint(path), quantization=Quantization("fp8", {}, {}, (), 0))
    choose = partial(choose_form, quantized, device=CPU)
    assert choose(EngineConfig()) is quantized
    with pytest.raises(ConfigError, match=r"quant_config.quant_algo: 'FP8'; the checkpoint is quantized already"):
        choose(EngineConfig(**asks("FP8")))


def test_nothing_keeps_the_weights_that_were_rounded(path):
    model = read_model(stored_as(open_checkpoint(path), StoredAs("FP8_PER_CHANNEL_PER_TOKEN")), "float32", CPU)
    layers = model.model.layers
    assert all(isinstance(linear, StoredLinear) for linear in (layers[0].self_attn.q_proj, layers[1].mlp.down_proj))
    weights = fuse(model, 64)
    assert weights.layers[0].qkv.values.data_ptr() == layers[0].self_attn.q_proj.weight.data_ptr()
    large = [name for name, tensor in model.named_parameters() if "layers" in name and tensor.dim() > 1]
    assert large == []


def test_a_first_token_whose_embedding_is_zero_is_no_reason_against_a_start(path):
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    checkpoint = stored_as(open_checkpoint(path), StoredAs("FP8"))
    model = read_model(checkpoint, dtype, torch.device(device)).to(device)
    model.model.embed_tokens.weight.data[0] = 0
    model.layers = model.model.layers
    warmup.check_layers(fuse(model, 64), model)


@pytest.mark.parametrize(
    ("kind", "changes", "algo", "is_usable", "reason"),
    [
        ("mistral", {}, "FP8", False, "a CPU, or a GPU without triton, has no products of weights in few bits"),
        ("gpt2", {}, "FP8", True, "GPT2LMHeadModel is not one of"),
        ("mixtral", {"num_local_experts": 4}, "FP8", True, "gate_proj is no linear projection here"),
        ("mistral", {"intermediate_size": 160}, "FP8_BLOCK_SCALES", True, r"gate_proj is \(160, 128\), whose rows"),
        ("mistral", {"intermediate_size": 24}, "FP8", True, r"gate_proj is \(24, 128\), whose rows do not divide"),
    ],
)
def test_what_no_decoder_here_reads_is_refused_by_name(tmp_path, monkeypatch, kind, changes, algo, is_usable, reason):
    path = tiny_models.save(tmp_path, kind, **(SMALL | changes))
    monkeypatch.setattr(kernels, "is_usable", lambda device: is_usable)
    with pytest.raises(ConfigError, match=f"quant_config.quant_algo: .*{algo}.*{reason}"):
        Harness(path, **ENGINE, **asks(algo))


@pytest.mark.parametrize(
    ("device", "generation", "takes"),
    [("cuda", (8, 0), False), ("cuda", (8, 9), True), ("cuda", (9, 0), True), ("cpu", (0, 0), True)],
)
def test_gpus_that_convert_no_8_bit_floats_take_none(monkeypatch, device, generation, takes):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    assert kernels.why_no_fp8(torch.device(device)) == (
        "" if takes else "GPUs before compute capability 8.9 have no 8-bit floats, and this one has 8.0"
    )


@pytest.mark.parametrize(
    ("algo", "generation", "said"),
    [
        ("FP8", (8, 6), "GPUs before compute capability 8.9 have no 8-bit floats, and this one has 8.6"),
        ("W4A16_AWQ", (7, 5), "GPUs before compute capability 8.0 have no bfloat16, and this one has 7.5"),
        ("W4A16_AWQ", (8, 6), ""),
    ],
)
def test_an_older_gpu_is_refused_by_algo_generation_and_remedy_before_weights_are_read(
    tmp_path, monkeypatch, algo, generation, said
):
    checkpoint = open_checkpoint(tiny_models.save(tmp_path, "llama"))
    if algo.startswith("W4"):
        checkpoint = replace(checkpoint, shards=())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    monkeypatch.setattr(weight_form, "_open", lambda *given: (None, "its model was looked at first"))
    with pytest.raises(ConfigError, match=f"quant_config.quant_algo: '{algo}'.*{said or 'looked at first'}"):
        choose_form(checkpoint, EngineConfig(**asks(algo)), torch.device("cuda"))
