"""What an engine has found out at its start is kept: the next life of its worker runs the model's modules no more."""

from __future__ import annotations

import logging

import pytest
import torch

from bireme.engines.torch.forward import opening
from bireme.engines.torch.forward.modules import Modules
from bireme.engines.torch.forward.packed_decoder import PackedDecoder
from tests.engines.torch import tiny_models
from tests.engines.torch.torch_harness import Harness, make_prompts, request

PROMPTS = make_prompts(5, 30, 60, seed=1)
OF_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "hidden_size": None}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="engines here compute on the GPU")


@pytest.fixture
def model(request, tmp_path):
    family = getattr(request, "param", "llama")
    return tiny_models.save(tmp_path / "model", family, **(OF_GPT2 if family == "gpt2" else {}))


@pytest.fixture
def found_out(monkeypatch):
    """What of the model was run while an engine started, or served."""
    seen = []
    for holder, name in ((opening, "probe"), (opening, "peak_bytes"), (Modules, "compute")):
        made = getattr(holder, name)
        monkeypatch.setattr(holder, name, lambda *args, made=made, name=name: (seen.append(name), made(*args))[1])
    return seen


def start(model, path, **settings):
    return Harness(model, context={"findings_path": path}, **settings)


def has_decoder(engine):
    return "modules" not in engine.core._parts.forward.paths


def answer(model, path, **settings):
    with start(model, path, **settings) as engine:
        return engine.run([request(prompt, 6) for prompt in PROMPTS]), has_decoder(engine)


@pytest.mark.parametrize("model", ["llama", "gemma3_text", "gpt2"], indirect=True)
def test_the_next_life_answers_alike_and_does_not_find_it_out_again(model, tmp_path, found_out, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "found"
    expected = answer(model, path)
    assert "probe" in found_out
    found_out.clear()
    with start(model, path) as engine:  # without a decoder of ours the modules warm up and serve
        assert set(found_out) == (set() if has_decoder(engine) else {"compute"})
    assert answer(model, path) == expected
    assert caplog.text.count("findings_read layers=3") == 2


@on_cpu
def test_a_decoder_that_computes_something_else_is_found_out_in_a_later_life(model, tmp_path, monkeypatch, caplog):
    path = tmp_path / "found"
    expected = answer(model, path)
    with monkeypatch.context() as changed:
        compute = PackedDecoder.compute
        changed.setattr(PackedDecoder, "compute", lambda self, batch: compute(self, batch) * 2)
        assert answer(model, path) == (expected[0], False)
    assert "fused_off reason=DifferentLogitsError: its logits of a prompt are 1 off" in caplog.text
    assert answer(model, path) == expected


def test_what_was_found_of_another_model_or_configuration_is_not_used(model, tmp_path, found_out):
    path, other = tmp_path / "found", tiny_models.save(tmp_path / "other", "llama", num_hidden_layers=2)
    answer(model, path)
    for again, settings in ((other, {}), (model, {"max_num_tokens": 64}), (model, {})):
        found_out.clear()
        answer(again, path, **settings)
        assert "probe" in found_out


@pytest.mark.parametrize("damage", [b"", b"no findings", None])
def test_a_file_that_can_not_be_read_is_told_and_made_anew(model, tmp_path, damage, found_out, caplog):
    path = tmp_path / "found"
    answer(model, path)
    path.write_bytes(path.read_bytes()[:-9] if damage is None else damage)
    answer(model, path)
    assert "findings_not_read reason=" in caplog.text
    found_out.clear()
    answer(model, path)
    assert not found_out


def test_a_folder_that_is_gone_is_told_and_costs_nothing_else(model, tmp_path, caplog):
    answer(model, tmp_path / "gone" / "found")
    assert "findings_not_kept reason=" in caplog.text and not (tmp_path / "gone").exists()
