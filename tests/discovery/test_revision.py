"""A model's revision: the same content has the same, and what makes other tokens another one."""

import shutil

import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.discovery.revision import model_revision, worker_revision


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (12 << 10))  # 3 MiB
    return folder


def test_a_copy_has_the_same_wherever_and_whenever_it_lies(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    assert model_revision(str(model)) == model_revision(str(tmp_path / "copy")) != ""


@pytest.mark.parametrize("place", [0, 1 << 20, -1])
def test_other_weights_of_the_same_size_have_another(model, place):
    before = model_revision(str(model))
    weights = bytearray((model / "model.safetensors").read_bytes())
    at = place % len(weights)
    weights[at : at + 300_000] = bytes(len(weights[at : at + 300_000]))
    (model / "model.safetensors").write_bytes(weights)
    assert model_revision(str(model)) != before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "vocab.txt"])
def test_so_has_another_small_file(model, name):
    before = model_revision(str(model))
    (model / name).write_text("another")
    assert model_revision(str(model)) != before


def test_notes_beside_it_do_not_count(model):
    before = model_revision(str(model))
    (model / "README.md").write_text("notes")
    (model / ".cache").mkdir()
    assert model_revision(str(model)) == before


def test_of_what_is_no_folder_nothing_is_known(tmp_path):
    assert model_revision("org/some-model") == model_revision(str(tmp_path)) == ""


def of_workers(model, **workers):
    entries = {stage: {"engine": "mocker"} | more for stage, more in workers.items()}
    return convert({"model": str(model), "workers": entries, "name": "test"}, Recipe, "test")


def test_workers_have_their_model_s_revision_and_an_unknown_one_where_a_stage_s_model_is_not_there(model):
    recipe = of_workers(model, prefill={}, decode={})
    assert worker_revision(recipe, "decode") == worker_revision(recipe, "prefill") == model_revision(str(model))
    assert worker_revision(of_workers(model, prefill={"model": "/not/here"}, decode={}), "decode") == ""


def test_stages_with_models_of_their_own_have_one_revision_of_both(model, tmp_path):
    shutil.copytree(model, tmp_path / "small")
    (tmp_path / "small" / "config.json").write_text('{"quantized": true}')
    recipe = of_workers(model, prefill={}, decode={"model": str(tmp_path / "small")})
    before = worker_revision(recipe, "decode")
    assert before == worker_revision(recipe, "prefill") != model_revision(str(model))
    (model / "config.json").write_text('{"layers": 3}')
    assert worker_revision(recipe, "decode") == worker_revision(recipe, "prefill") != before
