"""`--set KEY=VALUE`: single settings of a recipe from the command line, over `--override`.

--set workers.decode.engine_config.max_batch_size=64 --set 'chat.tool_parser=hermes'
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from bireme import yaml_text
from bireme.errors import ConfigError
from bireme.recipe_files import deep_merge


def add_settings(override: str, settings: Sequence[str]) -> str:
    """Return the override's JSON with KEY=VALUE settings merged over it, in their order. Raises ConfigError.

    A key is dotted from the top of recipe.yaml; a value is YAML: `[0, 1]` is a list, `null` nothing.
    """
    if not settings:
        return override
    tree = _parse(override)
    for setting in settings:
        deep_merge(tree, parse_setting(setting))
    return json.dumps(tree)


def parse_setting(setting: str) -> dict[str, Any]:
    """Return what KEY=VALUE merges over a recipe. Raises ConfigError."""
    key, separator, text = setting.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set {setting}: KEY=VALUE is expected, such as workers.decode.replicas=2")
    return _nest(key.split("."), _value(setting, text))


def _parse(override: str) -> dict[str, Any]:
    try:
        tree = json.loads(override or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--override: not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError("--override: a JSON object is expected")
    return tree


def _value(setting: str, text: str) -> Any:
    try:
        value = yaml_text.read(text)
        json.dumps(value)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {setting}: the value is not YAML that JSON can carry; quote it") from error
    return value


def _nest(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    assert isinstance(value, dict)
    return value
