"""A GGUF file's weights stay in its blocks on a CPU: what is served is their dequantized forward, rows of x rounded."""

import contextlib
import re

import gguf
import pytest
import torch

from bireme.config import QuantConfig
from bireme.engines.torch.forward import quantized_linear
from bireme.engines.torch.forward.packed_decoder import PackedDecoder
from bireme.engines.torch.forward.tapped import TappedRows
from bireme.engines.torch.weights.checkpoint import open_checkpoint, read_model
from tests.engines.torch.test_disaggregated import Pair
from tests.engines.torch.test_packed_decoder import library
from tests.engines.torch.torch_harness import Harness, make_prompts, request
from tests.gguf import models
from tests.gguf.files import write

KINDS = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0")]
PLAIN = QuantConfig(quant_algo="NO_QUANT")
PROMPTS = make_prompts(3, 20, 45, 70)
LONG = make_prompts(*range(60, 160, 10), seed=4)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="engines here compute on the GPU")
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.fixture(autouse=True)
def compiled(cache_home, monkeypatch):
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))


@pytest.fixture
def in_float32(monkeypatch):
    """A CPU that does not multiply bfloat16 has such files in float32."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")


def asked(max_tokens=24):
    return [request(prompt, max_tokens) for prompt in PROMPTS]


def decoder_of(engine):
    return engine.core._parts.forward.decoder


@contextlib.contextmanager
def rounded_inputs(model):
    """Have a model's linear layers see their inputs as the products do."""
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: quantized_linear.round_rows(inputs[0]).to(inputs[0].dtype))
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    yield
    for hook in hooks:
        hook.remove()


def prompt_logprobs(engine, prompts):
    results = [engine.submit(request(prompt, 1, prompt_logprobs=0)) for prompt in prompts]
    assert [result.finish.error for result in results] == [""] * len(prompts)
    return torch.tensor([entry[0][1] for result in results for entry in result.prompt_logprobs])


@torch.inference_mode()
def modules_logprobs(model, prompts):
    found = []
    for prompt in prompts:
        rows = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        found.append(rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    return torch.cat(found)


@kinds
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits_are_those_of_the_dequantized_forward_with_rounded_rows(tmp_path, in_float32, kind, architecture):
    file = models.save(tmp_path, architecture, kind)
    model = read_model(open_checkpoint(str(file)), "float32", torch.device("cpu"))
    with rounded_inputs(model):
        expected = modules_logprobs(model, LONG)
    with Harness(str(file), max_num_tokens=64) as engine:
        assert decoder_of(engine).form == kind.name.lower()
        found = prompt_logprobs(engine, LONG)
    error = float((found - expected).norm() / expected.norm())
    assert error < 2e-2, error


@kinds
def test_log_and_paths_tell_the_form(tmp_path, caplog, kind):
    caplog.set_level("INFO")
    with Harness(str(models.save(tmp_path, "llama", kind)), max_num_tokens=24) as engine:
        assert engine.capacity.step_paths == ("quantized",)
    assert re.search(
        rf"weights_kept file=tiny.gguf forms={kind.name}:\d+ mib=\d+ by=(avx512_vnni|avx2|none)", caplog.text
    )
    assert f"weights={kind.name.lower()} " in caplog.text and "weights_dequantized" not in caplog.text


@kinds
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_tokens_do_not_depend_on_the_rows_beside(tmp_path, kind, architecture):
    """Whole prompts: the order in which attention adds up chunks is another matter."""
    with Harness(str(models.save(tmp_path, architecture, kind)), enable_block_reuse=False) as engine:
        alone = [engine.run([one])[0] for one in asked()]
        assert engine.run(asked()) == alone


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_step_in_one_call_is_the_single_operations_to_the_last_bit(tmp_path, monkeypatch, architecture):
    """A row alone and several, two threads, contexts of more keys than a tile has."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # engines of tests have one
    prompts = make_prompts(3, 20, 45, 110, 9, seed=2)
    found = []
    with Harness(str(models.save(tmp_path, architecture, KINDS[1])), enable_block_reuse=False) as engine:
        decoder = decoder_of(engine)
        assert decoder._step is not None
        for step in (decoder._step, None):
            decoder._step = step
            results = [engine.submit(request(prompt, 8 + at, logprobs=0)) for at, prompt in enumerate(prompts)]
            assert [result.finish.error for result in results] == [""] * len(prompts)
            found.append([result.logprobs for result in results])
    assert found[0] == found[1]


def test_a_decoder_whose_layers_outputs_are_kept_has_no_step_in_one_call(tmp_path):
    with Harness(str(models.save(tmp_path, "llama", KINDS[1])), enable_block_reuse=False) as engine:
        decoder = decoder_of(engine)
        linears = [[layer.qkv, layer.output, *layer.mlp.linears] for layer in decoder._layers]
        assert decoder._step is not None and decoder._whole_step(linears) is not None
        decoder.tap(TappedRows([0]))
        assert decoder._step is None and decoder._whole_step(linears) is None


@kinds
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_chunks_reuse_and_another_engine_s_kv_change_no_token(tmp_path, in_float32, kind, architecture):
    """In few tokens: a sum in another order may turn a rounding of rows, and that a choice between near ties."""
    file = str(models.save(tmp_path, architecture, kind))
    with Harness(file) as engine:
        expected = engine.run(asked(16))
    with Harness(file, max_num_tokens=24, tokens_per_block=8) as engine:
        assert engine.run(asked(16)) == expected and engine.run(asked(16)) == expected
        assert engine.manager.num_referenced == 0
    with Pair(file) as pair:
        assert pair.run(PROMPTS, max_tokens=16) == expected


def test_a_recipe_may_have_them_dequantized_and_a_dtype_says_what_is_computed_in_alone(tmp_path):
    file = str(models.save(tmp_path, "llama", KINDS[0]))
    with Harness(file, max_num_tokens=24, quant_config=PLAIN) as engine:
        assert engine.capacity.step_paths == ("packed",) and decoder_of(engine).form == "plain"
    with Harness(file, max_num_tokens=24, dtype="bfloat16") as engine:
        assert engine.capacity.step_paths == ("quantized",) and engine.capacity.dtype == "bfloat16"


def test_kv_of_kept_blocks_is_not_that_of_dequantized_ones(tmp_path):
    file, roots = str(models.save(tmp_path, "llama", KINDS[0])), []
    for own in (QuantConfig(), QuantConfig(), PLAIN):
        with Harness(file, max_num_tokens=24, quant_config=own) as engine:
            roots.append(engine.manager.open().root)
    assert roots[0] == roots[1] != roots[2]


def test_without_a_compiler_they_are_dequantized(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with Harness(str(models.save(tmp_path, "llama", KINDS[1])), max_num_tokens=24) as engine:
        assert engine.capacity.step_paths == ("packed",)
    assert "native_off" in caplog.text and "weights_kept file=tiny.gguf forms=none" in caplog.text


def test_matrices_with_other_types_are_dequantized_and_each_type_is_told(tmp_path, in_float32, caplog):
    caplog.set_level("INFO")
    model = models.build("llama")
    metadata = models.metadata_of("llama", model) | models.byte_tokenizer(model.config.vocab_size)
    tensors = models.tensors_of("llama", model)
    other = gguf.GGMLQuantizationType.Q5_0
    odd = [name for name in tensors if "ffn_down" in name or name == "blk.1.attn_v.weight"]
    raw = {name: (gguf.quantize(tensors.pop(name), other), other) for name in odd}
    file = write(tmp_path / "tiny.gguf", metadata, tensors, KINDS[0], raw)
    with Harness(str(file), max_num_tokens=24) as engine:
        decoder = decoder_of(engine)
        tokens = engine.run(asked())
    assert isinstance(decoder, PackedDecoder) and decoder._layers[0].qkv.kept and not decoder._layers[1].qkv.kept
    count = model.config.num_hidden_layers + 1
    assert f"weights_dequantized type=Q5_0 count={count} first=model.layers.0.mlp.down_proj.weight" in caplog.text
    assert all(len(own) == 24 for own in tokens)


def test_a_product_that_is_another_has_its_weights_dequantized(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        quantized_linear.QuantizedLinear, "__call__", lambda self, x, add_to: x.new_zeros(len(x), self.shape[0])
    )
    with Harness(str(models.save(tmp_path, "llama", KINDS[2])), max_num_tokens=24) as engine:
        assert engine.capacity.step_paths == ("packed",)
        assert len(engine.run(asked())[0]) == 24
    assert "weights_not_packed reason=a packed product of 1 rows is" in caplog.text
