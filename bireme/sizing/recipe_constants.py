"""Sets measured constants in a recipe's block `router`; comments and all else stay as they are."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bireme import yaml_text
from bireme.errors import ConfigError
from bireme.recipe_files import load_recipe

_MADE = ("# Made by: ", "# Router's prices: ")  # lines of tools/make_recipe.py and of this module


def is_made(folder: Path) -> bool:
    """Whether a recipe was made for its model and machine by a program, or has had constants before."""
    text = (folder / "recipe.yaml").read_text(encoding="utf-8")
    return any(line.startswith(_MADE) for line in text.splitlines())


def written(text: str, constants: Mapping[str, float], name: str = "recipe.yaml") -> tuple[str, list[str]]:
    """Return the text with the constants, and what changed. Raises ConfigError for a block that can't be changed.

    `transfer_ms: 0` sends every prompt through prefill: that is a decision, and stays.
    """
    tree = _parsed(text, name)
    old = tree.get("router", {})
    if not isinstance(old, dict):
        raise ConfigError(f"{name}: router: {old!r}; a block of keys, or no key `router` at all, can be written to")
    changes = _changes(old, constants)
    said = [f"router.{key}: {old.get(key, 'unset')} -> {value:g}" for key, value in changes.items()]
    if any(_is_decided(old, key) for key in constants):
        said.append("router.transfer_ms: 0 stays, it sends every prompt through prefill; remove it to set it")
    try:
        text = functools.reduce(lambda before, key: _with(before, key, changes[key]), changes, text)
    except yaml.YAMLError as error:  # libyaml, which recipes are read by, takes a tab where PyYAML does not
        raise ConfigError(f"{name}: can't be changed here ({error}); set {', '.join(changes)} by hand") from error
    if _parsed(text, name) != tree | ({"router": old | changes} if changes else {}):
        raise ConfigError(
            f"{name}: router: written in a way that can't be changed here; set {', '.join(changes)} by hand"
        )
    return text, said


def write(folder: Path, constants: Mapping[str, float], source: str) -> list[str]:
    """Set constants in a recipe folder, with a comment that says where they are from, and return what changed.

    Raises ConfigError. The file is a checked one or unchanged.
    """
    path = folder / "recipe.yaml"
    try:
        before = path.read_text(encoding="utf-8")
        text, said = written(before, constants, str(path))
        if text == before:
            return said
        kept = [line for line in text.splitlines(keepends=True) if not line.startswith(_MADE[1])]
        text = f"{_MADE[1]}measured, by tools/advise.py from {' '.join(source.split())}\n" + "".join(kept)
        load_recipe(folder, json.dumps({"router": _parsed(text, str(path))["router"]}))  # as it will be
        fresh = path.with_name(".recipe.yaml.new")
        fresh.write_text(text, encoding="utf-8")
        os.chmod(fresh, path.stat().st_mode)
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"--recipe {folder}: recipe.yaml can't be written ({error})") from error
    return said


def _changes(old: Mapping[str, Any], constants: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in constants.items() if old.get(key) != value and not _is_decided(old, key)}


def _is_decided(router: Mapping[str, Any], key: str) -> bool:
    return key == "transfer_ms" and router.get(key) == 0


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        tree = yaml_text.read(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: no YAML ({error})") from error
    return tree if isinstance(tree, dict) else {}


def _with(text: str, key: str, value: float) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    router = _value_of(root, "router")
    if not isinstance(router, yaml.MappingNode):
        return f"{text.rstrip()}\nrouter:\n  {key}: {value:g}\n"
    if (old := _value_of(router, key)) is not None:
        return text[: old.start_mark.index] + f"{value:g}" + text[old.end_mark.index :]
    if not router.value:
        at = router.start_mark.index + 1
        return f"{text[:at]}{key}: {value:g}{text[at:]}"
    first = router.value[0][0].start_mark
    between = ", " if router.flow_style else "\n" + " " * first.column
    return f"{text[: first.index]}{key}: {value:g}{between}{text[first.index :]}"


def _value_of(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)
