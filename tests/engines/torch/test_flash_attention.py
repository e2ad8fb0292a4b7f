"""Which attention prompts take on a GPU: FA3 where its wheel is there and right, torch's own otherwise."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from bireme.engines.torch.forward import flash_attention
from bireme.engines.torch.forward.attention import Extras
from bireme.engines.torch.forward.flash_attention import FlashAttention, Heads, open_flash_attention
from bireme.engines.torch.geometry import LayerGeometry
from bireme.engines.torch.step import KernelGroup, PackedChunks
from tests.engines.torch import tiny_models
from tests.engines.torch.stand_in_fa3 import StandInFa3
from tests.engines.torch.torch_harness import Harness, make_prompts, request

CPU = torch.device("cpu")
HEADS, NUM_KV, SIZE = 4, 2, 16
LAYER = LayerGeometry(NUM_KV, SIZE, SIZE, 0, torch.bfloat16, ())
HAS_FA3 = torch.cuda.is_available() and flash_attention.capability(torch.device("cuda")) == (9, 0)
needs_fa3 = pytest.mark.skipif(
    not HAS_FA3 or importlib.util.find_spec("fa3_fwd_interface") is None, reason="needs a Hopper GPU and fa3-fwd"
)


@pytest.fixture
def open_with(monkeypatch):
    """Return what finds the attention of layers, on a machine that has this module for FA3's."""

    def make(module, generation=(9, 0), geometry=(LAYER,)):
        def find():
            if isinstance(module, Exception):
                raise module
            return module

        monkeypatch.setattr(flash_attention, "capability", lambda device: generation)
        monkeypatch.setattr(flash_attention, "import_fa3", find)
        return open_flash_attention(geometry, HEADS, CPU)

    return make


def test_fa3_is_taken_where_it_computes_what_plain_torch_does(open_with, caplog):
    module = StandInFa3()
    assert open_with(module).names == ["fa3", "torch", "packed"]
    assert module.calls == [(130, 130, True), (128, 300, True)]  # prompts alone, and chunks behind prefixes
    assert caplog.records == []


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (ImportError("libcudart.so.13: cannot open shared object file"), "ImportError: libcudart.so.13: cannot open"),
        (StandInFa3(lambda found: found * 1.5), "RuntimeError: 130 tokens that see 130 are 0.5"),
        (StandInFa3(lambda found: found.fill_(float("nan"))), "RuntimeError: 130 tokens that see 130 are nan off"),
        (StandInFa3(lambda found: found[:-1]), "RuntimeError: it returns (200, 4, 16) torch.bfloat16 of (201, 4, 16)"),
        (StandInFa3(lambda found: (found, None)), "AttributeError: 'tuple' object has no attribute"),
        (StandInFa3(lambda found: 1 / 0), "ZeroDivisionError: division by zero"),
        (object(), "AttributeError: 'object' object has no attribute 'flash_attn_varlen_func'"),
    ],
    ids=["no CUDA 13", "off", "not finite", "a row too few", "another result", "raises", "another wheel"],
)
def test_a_wheel_that_does_not_work_is_told_once_and_left(open_with, caplog, module, reason):
    assert open_with(module).names == ["torch", "packed"]
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().startswith(f"fa3_off reason={reason}")


def test_one_that_is_right_without_a_prefix_alone_is_left(open_with, caplog):
    turns = iter([lambda found: found, lambda found: found.roll(1, 0)])
    assert open_with(StandInFa3(lambda found: next(turns)(found))).names == ["torch", "packed"]
    assert "70 tokens that see 200 are" in caplog.text


@pytest.mark.parametrize(
    ("generation", "names"),
    [((8, 0), ["torch", "packed"]), ((10, 0), ["torch", "packed"]), ((7, 5), ["packed"]), ((0, 0), ["packed"])],
)
def test_no_other_generation_of_gpus_is_given_it(open_with, caplog, generation, names):
    module = StandInFa3()
    assert open_with(module, generation).names == names
    assert module.calls == [] and caplog.records == []


@pytest.mark.parametrize("change", [{"dtype": torch.float16}, {"dtype": torch.float32}, {"value_size": 8}])
def test_layers_that_it_does_not_compute_are_not_tried(open_with, change):
    module = StandInFa3()
    assert open_with(module, geometry=[dataclasses.replace(LAYER, **change)]).names == ["torch", "packed"]
    assert module.calls == []


def test_where_the_wheel_is_not_installed_nothing_is_said(open_with, caplog):
    assert open_with(None).names == ["torch", "packed"] and caplog.records == []


class Pools:
    """A layer of random keys and values, and chunks over it."""

    def __init__(self, dtype=torch.bfloat16, size=SIZE, device=CPU, num_rows=400):
        random = torch.Generator(device).manual_seed(3)
        shape = {"generator": random, "device": device}
        self.keys, self.values = (torch.randn(num_rows, NUM_KV * size, **shape).to(dtype) for _ in range(2))
        self._packed, self._size = torch.randn(num_rows, HEADS, size, **shape).to(dtype), size

    def attend(self, flash, lengths, window=0, **extras):
        """Return attention of chunks of (tokens, tokens seen), by `flash` and in float32."""
        pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
        from bireme.engines.torch.forward.kernel_step import attend_stored
        from tests.engines.torch import kernel_references as references

        own, seen = ([0], [0])
        for num_tokens, num_seen in lengths:
            own.append(own[-1] + num_tokens)
            seen.append(seen[-1] + num_seen)
        rows = torch.randperm(len(self.keys), generator=torch.Generator().manual_seed(1))[: seen[-1]]
        rows = rows.to(self.keys.device)
        begins = [torch.tensor(ends, dtype=torch.int32, device=rows.device) for ends in (own, seen)]
        longest = [max(column) for column in zip(*lengths, strict=True)]
        chunks = PackedChunks(0, own[-1], rows, *begins, *longest, is_fresh=own == seen)
        query, shape = self._packed[: own[-1]], (seen[-1], NUM_KV, self._size)
        key, value = (pool[rows].view(shape) for pool in (self.keys, self.values))
        wanted = Extras(0.3, **extras)
        found = attend_stored(
            KernelGroup(rows, None, [chunks], window), query, key, value, self.keys, self.values, 4, wanted, flash
        )
        floats = (query.float(), self.keys.float(), self.values.float(), rows, *begins, longest[0], NUM_KV, 0.3)
        return found.float(), references.packed_prefill(*floats, window, wanted.softcap)


@pytest.mark.parametrize("lengths", [[(40, 40)], [(30, 30), (9, 9)], [(20, 90)], [(11, 60), (3, 3), (1, 80)]])
def test_fresh_prompts_and_chunks_behind_prefixes_are_attended_to_by_fa3(open_with, lengths):
    module = StandInFa3()
    flash = open_with(module)
    module.calls.clear()
    found, expected = Pools().attend(flash, lengths)
    assert float((found - expected).norm() / expected.norm()) < 0.01
    assert module.calls == [(max(own for own, _ in lengths), max(seen for _, seen in lengths), True)]


def test_a_window_is_torchs_own_until_all_that_is_seen_lies_in_it(open_with, monkeypatch):
    module, windows = StandInFa3(), []

    def by_torch(query, key, value, chunks, scaling, window):
        windows.append(window)
        return query

    flash = open_with(module)
    monkeypatch.setattr(flash_attention, "_attend_by_torch", by_torch)
    module.calls.clear()
    for window in (40, 39):
        Pools().attend(flash, [(20, 40)], window)
    assert len(module.calls) == 1 and windows == [39]


def test_other_heads_and_other_numbers_are_torchs_own(open_with, monkeypatch):
    module, heads = StandInFa3(), []

    def by_torch(query, key, value, chunks, scaling, window):
        heads.append(Heads(query.shape[1], key.shape[1], query.shape[2]))
        return query

    flash = open_with(module)
    monkeypatch.setattr(flash_attention, "_attend_by_torch", by_torch)
    module.calls.clear()
    Pools(size=32).attend(flash, [(20, 40)])
    Pools(torch.float16).attend(flash, [(20, 40)])
    assert module.calls == [] and heads == [Heads(HEADS, NUM_KV, 32), Heads(HEADS, NUM_KV, 16)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels that are compiled take no rows of a CPU")
def test_softcap_and_float32_go_by_kernels_of_our_own(open_with):
    module = StandInFa3()
    flash = open_with(module)
    module.calls.clear()
    torch.testing.assert_close(*Pools(torch.float32).attend(flash, [(20, 40)], softcap=5.0))
    torch.testing.assert_close(*Pools(torch.float32).attend(flash, [(20, 40)]))
    assert module.calls == []


@needs_fa3
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[(2048, 2048)], [(512, 512)] * 4, [(2048, 8192)], [(1024, 32768)]])
def test_the_wheel_on_a_gpu_computes_what_torchs_own_kernels_do(size, lengths):
    device = torch.device("cuda")
    layer = LayerGeometry(NUM_KV, size, size, 0, torch.bfloat16, ())
    flash, own = open_flash_attention([layer], HEADS, device), FlashAttention(has_torch=True)
    assert flash.names == ["fa3", "torch", "packed"]
    pools = Pools(size=size, device=device, num_rows=40_000)
    found, expected = pools.attend(flash, lengths)
    theirs, _ = pools.attend(own, lengths)
    assert float((found - expected).norm() / expected.norm()) < 0.01
    assert float((found - theirs).norm() / theirs.norm()) < 0.01


@needs_fa3
def test_an_engine_computes_long_prompts_the_same_with_the_wheel_and_without(tmp_path, monkeypatch):
    path = tiny_models.save(tmp_path, "mistral", hidden_size=256, head_dim=64, max_position_embeddings=4096)
    (prompt,) = make_prompts(3000)
    settings = {"max_seq_len": 4000, "max_batch_size": 2, "max_num_tokens": 1024, "dtype": "bfloat16"}

    def logprobs(names):
        with Harness(path, **settings) as engine:
            assert engine.core._parts.forward.prompt_attention == names
            result = engine.submit(request(prompt, 1, prompt_logprobs=0))
            assert result.finish.error == ""
            return torch.tensor([entry[0][1] for entry in result.prompt_logprobs])

    found = logprobs(["fa3", "torch", "packed"])
    monkeypatch.setattr(flash_attention, "import_fa3", lambda: None)
    expected = logprobs(["torch", "packed"])
    assert (found - expected).abs().mean() < 0.02
