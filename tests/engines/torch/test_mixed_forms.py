"""Projections that are plain beside others in few bits: by a checkpoint's files, or by quant_config.exclude_modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from bireme.config import EngineConfig, QuantConfig
from bireme.engines.torch import kernels
from bireme.engines.torch.forward import warmup
from bireme.engines.torch.forward.decoder_weights import fuse
from bireme.engines.torch.forward.products import FewStoredRows, OneRow, products_for
from bireme.engines.torch.forward.weight_form import choose_form
from bireme.engines.torch.storage import StoredAs, WeightForm, form_of
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model, stored_as
from bireme.engines.torch.weights.plain_modules import matrices_of, named_plain
from bireme.engines.torch.weights.shared_weights import arrange, make_skeleton, weights_id
from bireme.engines.torch.weights.stored_linear import StoredLinear
from bireme.errors import ConfigError
from tests.engines.torch import tiny_models
from tests.engines.torch.quantized_checkpoints import LAYOUTS, write
from tests.engines.torch.test_kept_weights import SMALL
from tests.engines.torch.torch_harness import Harness, make_prompts, request

CPU = torch.device("cpu")
IS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = torch.device("cuda" if IS_GPU else "cpu"), "bfloat16" if IS_GPU else "float32"
CHANNEL = "FP8_PER_CHANNEL_PER_TOKEN"
TWO = SMALL | {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128}
ATTENTION = frozenset(
    f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in ("q", "k", "v", "o")
)


@pytest.fixture(autouse=True)
def usable(monkeypatch):
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory):
    return tiny_models.save(tmp_path_factory.mktemp("model"), "llama", **TWO)


def chosen(path, load_format="auto", **quant_config):
    config = EngineConfig(quant_config=QuantConfig(**quant_config))
    return choose_form(open_checkpoint(path, load_format=load_format), config, CPU)


def partly(folder, layout, is_plain, **told):
    """Write a layout of which some projections are plain."""
    own = LAYOUTS[layout]
    some = replace(own, config=own.config | told, chooses=lambda name: own.chooses(name) and not is_plain(name))
    return write(folder, some, **TWO)


def stored_in(model):
    return {name for name, module in model.named_modules() if isinstance(module, StoredLinear)}


PLAIN = {
    "attention": lambda name: "self_attn" in name,
    "MLPs": lambda name: "mlp" in name,
    "a layer": lambda name: "layers.1." in name,
    "one of a matrix": lambda name: "layers.0.self_attn.v_proj" in name,
}


@pytest.mark.parametrize("left", PLAIN)
@pytest.mark.parametrize("layout", ["fbgemm", "awq"])
def test_what_files_have_quantized_stays_beside_what_they_have_plain(tmp_path, layout, left):
    path, expected = partly(tmp_path, layout, PLAIN[left])
    checkpoint = chosen(path)
    model, own = read_model(checkpoint, "float32", CPU), dict(expected.named_modules())
    whole = [matrix for matrix in matrices_of(2) if not any(PLAIN[left](name) for name in matrix)]
    assert stored_in(model) == {name for matrix in whole for name in matrix} and 0 < len(whole) < 8
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            weight = module.stored.dequantized() if isinstance(module, StoredLinear) else module.weight
            assert torch.equal(weight, own[name].weight), name
    assert arrange(model) == arrange(make_skeleton(checkpoint, "float32"))
    ids = [weights_id(one, "float32", CPU) for one in (checkpoint, chosen(path, quant_algo="NO_QUANT"))]
    assert fuse(model, 64).form is checkpoint.stored_as.form and ids[0] != ids[1]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("left", list(PLAIN)[:2])
@pytest.mark.parametrize("algo", [CHANNEL, "FP8_BLOCK_SCALES", "W4A16_GPTQ"])
def test_each_product_of_mixed_layers_is_its_modules(plain_path, algo, left, monkeypatch):
    plain = frozenset(name for matrix in matrices_of(2) for name in matrix if PLAIN[left](name))
    like = StoredAs(algo, 128 if algo.startswith("W4") else 0)
    model = read_model(stored_as(open_checkpoint(plain_path), like, plain=plain), DTYPE, DEVICE).to(DEVICE)
    weights, seen = fuse(model, 64), []
    first = weights.layers[0]
    assert {form_of(first.qkv), form_of(first.down)} == {WeightForm.PLAIN, like.form} == {weights.form, "plain"}
    monkeypatch.setattr(warmup, "_compare", lambda what, expected, found, most: seen.append((expected, found)))
    model.layers = model.model.layers
    warmup.check_layers(weights, model)
    assert len(seen) == 12
    for expected, found in seen:
        assert float((found - expected).norm() / expected.norm()) < (0.05 if IS_GPU else 1e-3)
    x = 0.02 * torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(weights.embeddings)
    whole, steps = through(weights, x.clone()), through(weights, x.clone(), True)
    torch.testing.assert_close(whole, steps, rtol=0, atol=float(steps.abs().max()) * (0.02 if IS_GPU else 1e-4))


@pytest.mark.parametrize(("dtype", "kind"), [("float32", OneRow), ("bfloat16", OneRow), ("float16", FewStoredRows)])
def test_a_row_that_may_be_too_large_before_its_norms_scale_has_it_first(plain_path, dtype, kind):
    model = read_model(stored_as(open_checkpoint(plain_path), StoredAs("W4A16_GPTQ", 128)), DTYPE, DEVICE).to(DEVICE)
    row = torch.zeros(1, 128, dtype=getattr(torch, dtype), device=DEVICE)
    assert type(products_for(fuse(model, 64), row, True)) is kind


def through(weights, x, is_step_by_step=False):
    """Return rows after all layers; step by step nothing that a product adds waits for the next norm."""
    products = products_for(weights, x, True)
    for layer in weights.layers:
        products.add_output(layer, products.qkv(layer)[:, : layer.output.shape[1]].contiguous())
        if is_step_by_step:
            products.rows()
        products.add_mlp(layer)
        if is_step_by_step:
            products.rows()
    return products.rows()


@pytest.mark.usefixtures("few_programs")
def test_an_engine_rounds_all_but_excluded_modules_and_answers_as_its_reference(plain_path):
    asked = {"quant_config": QuantConfig(quant_algo=CHANNEL, exclude_modules=("*self_attn*", "lm_head"))}
    with Harness(plain_path, dtype=DTYPE, max_seq_len=64, max_batch_size=2, tokens_per_block=4, **asked) as engine:
        forward = engine.core._parts.forward  # it has compared each product and its logits with the modules'
        assert forward.resident is not None and forward.form is WeightForm.FP8_CHANNEL
        for layer in forward.resident.decoder.weights.layers:
            assert form_of(layer.qkv) is form_of(layer.output) is WeightForm.PLAIN
            assert form_of(layer.gate_up) is form_of(layer.down) is WeightForm.FP8_CHANNEL
        assert [len(one) for one in engine.run([request(prompt, 4) for prompt in make_prompts(20, 3, seed=1)])] == [
            4,
            4,
        ]


@pytest.mark.parametrize(
    ("patterns", "plain"),
    [
        (("*self_attn*",), ATTENTION),
        (("model.layers.*.self_attn",), ATTENTION),
        (("re:.*self_attn.*", "lm_head"), ATTENTION),
        (("model.layers.0", "model.layers.1.self_attn*"), None),
        (("*.q_proj", "*.k_proj", "*.v_proj"), {name for name in ATTENTION if "o_proj" not in name}),
    ],
)
def test_modules_are_excluded_by_their_name_or_that_of_one_around_them(plain_path, patterns, plain):
    found = chosen(plain_path, quant_algo=CHANNEL, exclude_modules=patterns)
    first = {name for matrix in matrices_of(1) for name in matrix}
    assert found.plain == (first | ATTENTION if plain is None else plain)
    assert found.digest != chosen(plain_path, quant_algo=CHANNEL).digest


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ("*attention*",),
            r"exclude_modules: '\*attention\*'; no module of the model's layers is named so; names are as",
        ),
        (("re:(",), r"exclude_modules: 're:\('; it matches no module of the model's layers, or is wrong"),
        (("re:(.|[a-z._0-9])*[0-9]!?[A-Z]",), r"exclude_modules: 're:.*'; it matches no"),  # it would go on for hours
        (("re:.*self_attn.*(?:x{1000}){0,1000}",), r"exclude_modules: 're:.*'; it matches no"),  # it would take 270 MB
        (("re:" + 3000 * "(" + 3000 * ")",), r"exclude_modules: 're:.*'; it matches no"),
        (("re:(?a)(?u).*self_attn.*",), r"exclude_modules: 're:.*'; it matches no"),
        (
            ("*v_proj",),
            r"'\*v_proj'; model.layers.0.self_attn.v_proj is one matrix here with model.layers.0.self_attn.q_proj and",
        ),
        (("*_proj",), "nothing is left to round; remove this and quant_config.quant_algo"),
    ],
)
def test_patterns_that_name_nothing_or_a_part_of_a_matrix_are_refused(plain_path, asked, said):
    with pytest.raises(ConfigError, match=f"quant_config.*{said}"):
        chosen(plain_path, quant_algo=CHANNEL, exclude_modules=asked)


def test_nothing_is_excluded_of_what_is_not_rounded(tmp_path, plain_path):
    for algo in (None, "NO_QUANT"):
        with pytest.raises(ConfigError, match=r"exclude_modules: '\*mlp\*'; without quant_config.quant_algo no weight"):
            chosen(plain_path, quant_algo=algo, exclude_modules=("*mlp*",))
    path, _ = partly(tmp_path, "fbgemm", PLAIN["attention"])
    with pytest.raises(ConfigError, match="the checkpoint is quantized already, and says itself what is plain"):
        chosen(path, quant_algo=CHANNEL, exclude_modules=("*mlp*",))


def test_made_up_weights_leave_plain_what_lists_of_the_configuration_name(tmp_path):
    path, _ = partly(tmp_path, "fbgemm", PLAIN["attention"], modules_to_not_convert=["self_attn", "lm_head"])
    assert stored_in(read_model(chosen(path, "dummy"), "float32", CPU)) == stored_in(
        read_model(chosen(path), "float32", CPU)
    )


@pytest.mark.parametrize(
    "told",
    [
        {"ignore": ["re:.*self_attn.*", "lm_head"]},
        {"ignore": sorted(ATTENTION)},
        {"exclude_modules": ["model.layers.*.self_attn*", "lm_head"]},
        {"modules_to_not_convert": ["self_attn"]},
        {"modules_to_not_convert": ["model.layers.0.self_attn", "model.layers.1.self_attn"]},
        {"dynamic": {"-:.*self_attn.*": {}, "+:.*down.*": {"bits": 8}}},
    ],
)
def test_each_methods_list_names_what_is_plain(told):
    assert named_plain(told, 2) == ATTENTION
    assert named_plain({"ignore": ["lm_head"], "modules_to_not_convert": None, "dynamic": 3}, 2) == frozenset()
