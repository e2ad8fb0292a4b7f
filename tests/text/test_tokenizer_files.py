"""The digest of what entries make prompts with: what changes it, and what does not."""

import json
import shutil

import msgspec
import pytest

from bireme.config import ChatConfig, Recipe, WorkerEntry
from bireme.text.tokenizer_files import text_revision

TEMPLATE = "{{ messages[0].content }}"


def recipe_of(folder, **more):
    return Recipe(model=str(folder), workers={"decode": WorkerEntry(engine="mocker")}, name="test", **more)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    (folder / "config.json").write_text('{"hidden_size": 64}')
    return folder


CHANGES = {
    "tokenizer.json": '{"model": {"vocab": {"b": 0}}}',
    "tokenizer_config.json": json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}),
    "chat_template.jinja": TEMPLATE + "!",
    "config_sentence_transformers.json": '{"prompts": {"query": "Find: "}}',
    "config.json": '{"vision_config": {"depth": 2}, "image_token_id": 7}',
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_makes_other_prompts_changes_it(folder, name):
    before = text_revision(recipe_of(folder))
    (folder / name).write_text(CHANGES[name])
    assert text_revision(recipe_of(folder)) not in ("", before)


def test_weights_settings_and_places_do_not(folder, tmp_path):
    before = text_revision(recipe_of(folder))
    other = tmp_path / "model-v2"
    shutil.copytree(folder, other)
    (other / "model.safetensors").write_bytes(b"other weights")
    (other / "config.json").write_text('{"hidden_size": 128}')
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "legacy": False}))
    (other / "chat_template.jinja").write_text(TEMPLATE)
    assert text_revision(recipe_of(other)) == before != ""


def test_a_template_in_place_of_the_model_s_counts_by_its_text(folder, tmp_path):
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    replaced = msgspec.structs.replace(recipe_of(folder), chat=ChatConfig(template=str(tmp_path / "own.jinja")))
    assert text_revision(replaced) == text_revision(recipe_of(folder))
    (tmp_path / "own.jinja").write_text("other")
    assert text_revision(replaced) != text_revision(recipe_of(folder))


def test_without_a_folder_or_a_tokenizer_it_is_not_known(folder):
    assert text_revision(recipe_of("org/name")) == text_revision(recipe_of("/not/here")) == ""
    (folder / "tokenizer.json").unlink()
    assert text_revision(recipe_of(folder)) == ""
