"""The packed decoder of CPUs: its operations in C++ equal those in plain torch, and what it can't compute the model's
own modules do."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil

import numpy as np
import pytest
import torch

from bireme.engines.torch import native
from bireme.engines.torch.forward import decoder_weights, packed_decoder, packed_linear
from bireme.engines.torch.forward.batch import BatchBuilder
from bireme.engines.torch.forward.decoder_ops import AttentionLayer, NativeOps, PlainOps
from bireme.engines.torch.forward.warmup import DifferentLogitsError, check_prompts
from bireme.engines.torch.geometry import Rotary
from bireme.engines.torch.native import cpu
from bireme.engines.torch.step import GroupStep, TableStep
from bireme.engines.torch.weights.checkpoint import choose_dtype
from tests.engines.torch import tiny_models
from tests.engines.torch.torch_harness import Harness, make_prompts, request

PROMPTS = make_prompts(5, 30, 60, seed=1)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="engines here compute on the GPU")
dtypes = pytest.mark.parametrize("dtype", CLOSE)


@functools.cache
def library():
    if not (os.environ.get("CXX") or any(map(shutil.which, ("g++", "c++", "clang++")))):
        pytest.skip("no C++ compiler")
    return native.load()[0]


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(found, expected, dtype):
    assert float((found - expected).float().norm() / expected.float().norm()) < CLOSE[dtype]


def layer(dtype, heads=4, kv_heads=2, size=16, window=0, is_normed=False, softcap=0.0, has_sinks=False):
    norms = (randn(size) + 2, randn(size) + 1) if is_normed else (None, None)
    keys, values = randn(17 * 8, kv_heads * size, dtype=dtype), 2 * randn(17 * 8, kv_heads * size, dtype=dtype)
    rotary, sinks = Rotary(randn(99, size), 1e-6, *norms), 3 * randn(heads) if has_sinks else None
    return AttentionLayer(rotary, keys, values, heads, 8, window, size**-0.5, softcap, sinks)


@dtypes
def test_norms_and_gates_in_cpp_equal_plain_torch(dtype):
    own = [layer(dtype)]
    plain, compiled = PlainOps(own), NativeOps(own, library())
    for rows in (1, 70):
        x, weight = 3 * randn(rows, 1000, dtype=dtype), randn(1000)
        assert_close(compiled.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5), dtype)
        assert_close(compiled.rms_norm(x, weight, 1e-5, x), plain.rms_norm(x, weight, 1e-5, x), dtype)
        for is_gelu in (False, True):
            assert_close(compiled.gate(30 * x, is_gelu), plain.gate(30 * x, is_gelu), dtype)


@dtypes
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 5, "kv_heads": 1, "size": 80},
        {"heads": 14, "kv_heads": 2, "size": 20},
        {"heads": 8, "kv_heads": 8, "size": 64, "window": 7},
        {"size": 128, "is_normed": True, "window": 20},
        {"size": 256, "is_normed": True},
        {"size": 32, "softcap": 2.0},
        {"heads": 8, "window": 20, "has_sinks": True},
    ],
    ids=str,
)
def test_paged_attention_in_cpp_equals_plain_torch(dtype, shape):
    """Three decode rows of different lengths, and nothing else in the step."""
    positions = torch.tensor([3, 64, 40])
    blocks = torch.tensor([[1, *[0] * 8], range(2, 11), [16, 15, 14, 13, 12, 11, 0, 0, 0]])
    slots = blocks[torch.arange(3), positions // 8] * 8 + positions % 8
    found = []
    for make in (PlainOps, functools.partial(NativeOps, library=library())):
        own = layer(dtype, **shape)
        qkv = randn(3, (own.num_heads + 2 * own.num_kv_heads) * own.size, dtype=dtype)
        step = TableStep(blocks, torch.arange(3)[None], 3, [])
        if make is PlainOps:
            builder = BatchBuilder([own.window], 8, 3, 99, torch.device("cpu"))
            step = GroupStep(slots, builder._decode(blocks.numpy(), np.arange(3), positions.numpy(), own.window), [])
        out = make([own]).attend(0, qkv, positions, step)
        found.append((out, own.keys, own.values))
    for expected, got in zip(*found, strict=True):
        assert_close(got, expected, dtype)


def native_ops(dtype):
    if dtype is torch.bfloat16 and not library()["has_tiles"]():
        pytest.skip("this CPU has no tiles of bfloat16")
    return NativeOps([layer(dtype)], library())


@dtypes
@pytest.mark.parametrize("shape", [(64, 1024), (203, 32), (9, 2112), (1000, 96)])
@pytest.mark.parametrize("rows", [*range(14), 16, 17, 32, 33, 40, 200, 600])
def test_products_with_weights_of_two_bytes_in_cpp_equal_plain_torch(rows, shape, dtype):
    """Widths that fill no panel, more depth and more rows than are multiplied at once."""
    width, depth = shape
    ops, x, weight = native_ops(dtype), randn(rows, depth, dtype=dtype), randn(*shape).bfloat16()
    own, others = randn(width, dtype=dtype), randn(rows, width, dtype=dtype)
    for bias, add_to in ((None, None), (own, None), (None, others), (own, others)):
        found = ops.linear(weight, bias)(x, add_to)
        expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        expected += 0 if add_to is None else add_to.float()
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        if rows:
            assert_close(found, expected, dtype)


@pytest.mark.parametrize("depth", [30, 1000])
def test_products_of_float_take_any_depth(depth):
    x, weight = randn(7, depth), randn(40, depth).bfloat16()
    found = native_ops(torch.float32).linear(weight, None)(x, None)
    assert_close(found, torch.nn.functional.linear(x, weight.float()), torch.float32)


def test_products_with_tiles_leave_other_depths_to_onednn():
    assert native_ops(torch.bfloat16).linear(randn(64, 48).bfloat16(), None) is None


@dtypes
def test_a_row_s_product_does_not_depend_on_the_rows_beside_it(dtype):
    x = randn(64, 1504, dtype=dtype)
    multiply = native_ops(dtype).linear(randn(100, 1504).bfloat16(), randn(100, dtype=dtype))
    together = multiply(x, None)
    for count in (1, 2, 5, 8, 33):
        assert multiply(x[:count], None).equal(together[:count])


@pytest.mark.parametrize("bias", [None, randn(10)])
def test_weights_that_two_bytes_hold_are_kept_as_such_and_no_others(bias):
    ops, x, add_to = NativeOps([layer(torch.float32)], library()), randn(5, 64), randn(5, 10)
    for weight, size in ((randn(10, 64), 4), (randn(10, 64).bfloat16().float(), 2)):
        linear, known = packed_linear.Linear(weight, bias), {}
        linear.pack(ops, known)
        assert list(known.values()) == [""] and (linear._weight.numel() == 0) is (size == 2)
        assert_close(linear(x, add_to), torch.nn.functional.linear(x, weight, bias) + add_to, torch.float32)


@pytest.mark.parametrize("ops", [NativeOps, PlainOps])
def test_weights_whose_packed_product_is_another_stay_plain(ops, monkeypatch):
    monkeypatch.setattr(packed_linear, "_MOST_ERROR", dict.fromkeys(CLOSE, -1.0))
    own = [layer(torch.float32)]
    linear, known = packed_linear.Linear(weight := randn(16, 64).bfloat16().float()), {}
    linear.pack(ops(own) if ops is PlainOps else ops(own, library()), known)
    assert "rows is" in next(iter(known.values())) and linear._weight is weight
    assert linear(x := randn(3, 64)).equal(torch.nn.functional.linear(x, weight))


def test_a_value_that_is_not_a_number_stays_visible():
    own = [layer(torch.float32)]
    x = randn(1, 64)
    x[0, 3] = float("nan")
    ops = NativeOps(own, library())
    assert ops.rms_norm(x, torch.ones(64), 1e-5).isnan().all() and ops.gate(x).isnan().any()


@pytest.fixture
def answer(tmp_path):
    """Return what an engine answers; chunks, a window, draws and log probabilities among it."""
    path = tiny_models.save(tmp_path, "mistral", sliding_window=24)
    asked = [
        request(PROMPTS[0], 9),
        request(PROMPTS[1], 9, temperature=0.9, seed=5),
        request(PROMPTS[2], 9, logprobs=2),
    ]

    def run(is_packed, **settings):
        with Harness(path, max_num_tokens=24, tokens_per_block=8, **settings) as engine:
            decoder = engine.core._parts.forward.decoder
            assert isinstance(decoder, packed_decoder.PackedDecoder) is is_packed
            assert engine.manager.num_referenced == 0  # the check at load, passed or not, has kept no block
            return engine.run(asked), decoder

    return run


@pytest.fixture
def by_modules(answer, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(decoder_weights, "FAMILIES", ())
        return answer(is_packed=False)[0]


@on_cpu
def test_it_answers_as_the_model_s_modules_do(answer, by_modules):
    library()
    tokens, decoder = answer(is_packed=True)
    assert tokens == by_modules and isinstance(decoder.ops, NativeOps)


@on_cpu
def test_without_a_compiler_it_answers_the_same(answer, by_modules, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    tokens, decoder = answer(is_packed=True)
    assert tokens == by_modules and isinstance(decoder.ops, PlainOps)
    assert "native_off reason=FileNotFoundError" in caplog.text


def test_a_compiler_s_error_is_told(monkeypatch, tmp_path):
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (wrong := tmp_path / "wrong.cpp").write_text("int x = y;")
    with pytest.raises(native.NativeUnavailableError, match="error"):
        native.load((wrong,))


def test_a_compiler_may_be_several_words(monkeypatch, tmp_path):
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "env g++ --no-such-flag")
    with pytest.raises(native.NativeUnavailableError, match="--no-such-flag"):
        native.load()


def test_a_cpu_with_other_instructions_gets_a_library_of_its_own(monkeypatch, tmp_path):
    """Hosts may share a home: what is made for one could hold instructions that the other lacks."""
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def note(compiler, flags, sources, path):
        made.append(path)
        raise native.NativeUnavailableError("not made")

    monkeypatch.setattr(native, "_compile", note)
    for flags in ({"avx2"}, {"avx2", "fma"}, {"avx2"}):
        monkeypatch.setattr(cpu, "flags", lambda flags=flags: frozenset(flags))
        with pytest.raises(native.NativeUnavailableError):
            native.load()
    assert made[0] == made[2] != made[1]


def test_a_folder_that_others_may_write_to_holds_no_code_for_us(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "g++")
    (tmp_path / "bireme").mkdir()
    (tmp_path / "bireme").chmod(0o777)
    with pytest.raises(native.NativeUnavailableError, match="not this user's alone"):
        native.load()


@on_cpu
def test_one_that_computes_something_else_is_not_used(answer, by_modules, monkeypatch, caplog):
    library()
    monkeypatch.setattr(NativeOps, "gate", lambda self, gate_up, is_gelu: gate_up.chunk(2, -1)[0].contiguous())
    assert answer(is_packed=False)[0] == by_modules
    assert "fused_off reason=DifferentLogitsError: its logits of a prompt are" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "has_experts", "right", "compared"),
    [
        (torch.bfloat16, True, 2, [0, 1, 2]),
        (torch.bfloat16, True, None, [0, 1, 2, 3]),
        (torch.bfloat16, False, None, [0]),
        (torch.float32, True, None, [0]),
    ],
)
def test_a_mixture_in_bfloat16_has_to_agree_on_one_of_four_prompts(dtype, has_experts, right, compared):
    seen = []

    def check(number):
        seen.append(number)
        if number != right:
            raise DifferentLogitsError

    with contextlib.nullcontext() if right else pytest.raises(DifferentLogitsError):
        check_prompts(dtype, has_experts, check)
    assert seen == compared


@on_cpu
def test_weights_that_can_not_be_packed_stay_plain(answer, by_modules, monkeypatch, caplog):
    monkeypatch.setattr(packed_linear, "_MOST_ERROR", dict.fromkeys(CLOSE, -1.0))
    assert answer(is_packed=True)[0] == by_modules
    assert "weights_not_packed reason=a packed product" in caplog.text


@on_cpu
def test_weights_are_held_once(tmp_path):
    with Harness(tiny_models.save(tmp_path, "qwen3")) as engine:
        assert all(parameter.is_meta for parameter in engine.core._parts.forward.modules._model.parameters())


def test_what_it_does_not_compute_is_told_with_the_reason(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with Harness(tiny_models.save(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=4, hidden_size=None)):
        assert "fused_off reason=GPT2LMHeadModel is not one of" in caplog.text


@pytest.mark.parametrize(
    ("own", "isa", "expected"),
    [("bfloat16", "", "bfloat16"), ("bfloat16", "AVX2", "float32"), ("float16", "", "float32"), (None, "", "float32")],
)
@on_cpu
def test_a_cpu_gets_the_dtype_that_it_has_instructions_for(monkeypatch, own, isa, expected):
    monkeypatch.setattr(cpu, "flags", lambda: frozenset({"avx512f", "avx512_bf16"}))
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", isa)
    config = type("Config", (), {"dtype": own})
    assert choose_dtype("auto", config) == getattr(torch, expected)
    assert choose_dtype("bfloat16", config) == torch.bfloat16
    monkeypatch.setattr(cpu, "flags", lambda: frozenset({"avx2"}))
    assert choose_dtype("auto", config) == torch.float32


def test_an_expert_s_rows_are_of_few_numbers_and_none_is_lost():
    counts = [len(packed_linear._filled(torch.zeros(count, 2))) for count in range(1, 513)]
    assert len(set(counts)) == 56 and all(0 <= more - count <= count / 8 for count, more in enumerate(counts, 1))
    assert packed_linear._filled(torch.arange(17)[:, None])[:, 0].tolist() == [*range(17), 16]
