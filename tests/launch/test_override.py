"""Settings of the command line, over a recipe."""

from __future__ import annotations

import json

import pytest

from bireme.errors import ConfigError
from bireme.launch.override import add_settings
from bireme.recipe_files import load_recipe


def test_a_setting_reaches_the_recipe():
    override = add_settings("", ["workers.decode.engine_config.max_batch_size=7"])
    assert load_recipe("recipes/tiny", override).workers["decode"].engine_config.max_batch_size == 7


def test_settings_win_over_the_override_and_leave_its_other_keys():
    override = add_settings('{"chat": {"tool_parser": "hermes"}, "model": "a"}', ["model=b", "chat.reasoning_parser="])
    assert json.loads(override) == {"chat": {"tool_parser": "hermes", "reasoning_parser": None}, "model": "b"}


def test_values_are_yaml():
    override = add_settings("", ["a.b=[0, 1]", "a.c='8'", "a.d={e: null}"])
    assert json.loads(override) == {"a": {"b": [0, 1], "c": "8", "d": {"e": None}}}


def test_no_setting_leaves_the_override_as_it_is():
    assert add_settings("not even JSON", []) == "not even JSON"


@pytest.mark.parametrize("setting", ["model", "=3", "a..b=3", "a=[", "a=2024-01-01"])
def test_what_is_no_setting_is_refused_by_its_text(setting):
    with pytest.raises(ConfigError, match=f"--set {setting[:3]}".replace("[", r"\[")):
        add_settings("", [setting])


def test_a_key_that_the_recipe_does_not_have_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="replicaz; did you mean replicas"):
        load_recipe("recipes/tiny", add_settings("", ["workers.decode.replicaz=2"]))
