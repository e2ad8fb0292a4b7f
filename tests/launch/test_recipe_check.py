"""Whatever has been done to a recipe, the check tells it and does not fail. The mistakes: tests/tools."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bireme.config import CHECKOUT
from bireme.errors import ConfigError
from bireme.launch.recipe_check import check_folder
from bireme.recipe_files import load_recipe

RECIPES = (
    "deepseek-r1-wide-ep",
    "llama4-eagle-disagg",
    "qwen2.5-vl-epd",
    "tiny-chat-disagg",
    "mocker-disagg",
    "wan-video",
)
VALUES = st.sampled_from([None, True, 0, -1, 7, 0.5, "", "x", "8", [], [1], {}, {"a": 1}, "decode.yaml"])


def read(name):
    """Return a recipe's files as trees by their names."""
    folder = CHECKOUT / "recipes" / name
    return {path.name: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))}


def paths_of(tree, path=()):
    inner = (
        [one for key, value in tree.items() for one in paths_of(value, (*path, key))] if isinstance(tree, dict) else []
    )
    return [path, *inner] if path else inner


def change(tree, path, value, is_removal):
    *blocks, name = path
    for block in blocks:
        tree = tree[block]
    if is_removal:
        del tree[name]
    else:
        tree[name] = copy.deepcopy(value)  # a later change may put something into it


def write(folder, files):
    for name, tree in files.items():
        (folder / name).write_text(yaml.dump(tree, Dumper=yaml.CSafeDumper))
    return folder


@pytest.mark.parametrize("name", RECIPES)
@given(data=st.data())
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_gets_findings_at_lines_that_exist(name, tmp_path_factory, data):
    files = copy.deepcopy(read(name))
    for _ in range(data.draw(st.integers(1, 3))):
        file = data.draw(st.sampled_from(sorted(files)))
        if paths := paths_of(files[file]):
            change(files[file], data.draw(st.sampled_from(paths)), data.draw(VALUES), data.draw(st.booleans()))
    folder = write(tmp_path_factory.mktemp("recipe"), files)
    for finding in check_folder(folder):
        assert 1 <= finding.line <= len(Path(finding.file).read_text().splitlines()) + 1
        assert finding.reason and Path(finding.file).parent == folder


@pytest.mark.parametrize("name", RECIPES)
@given(data=st.data())
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_the_loader_refuses_the_check_tells_as_an_error(name, tmp_path_factory, data):
    """No recipe is called good that the loader would not load."""
    files = copy.deepcopy(read(name))
    file = data.draw(st.sampled_from(sorted(files)))
    if paths := paths_of(files[file]):
        change(files[file], data.draw(st.sampled_from(paths)), data.draw(VALUES), data.draw(st.booleans()))
    folder = write(tmp_path_factory.mktemp("recipe"), files)
    try:
        load_recipe(folder, "")
    except ConfigError:
        assert any(finding.severity == "error" for finding in check_folder(folder))


def test_an_alias_within_its_own_block_is_a_finding(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: &it\n  inner: *it\n")
    [finding] = check_folder(tmp_path)
    assert "write the block out" in finding.reason
