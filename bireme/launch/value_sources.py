"""Where each value of a recipe came from: a line of a file, an option, the environment, or nothing set it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bireme.config import Recipe
from bireme.launch.recipe_check import read_sources
from bireme.launch.yaml_source import Keys, YamlSource, read_source
from bireme.recipe_files import recipe_tree

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Layer:
    """What is merged over a recipe, and what named it: an option or a variable."""

    name: str
    tree: Mapping[str, Any]


def tree_of(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as recipe.yaml would write all of it: loaded again it is the same."""
    tree: dict[str, Any] = msgspec.to_builtins(recipe)
    del tree["name"], tree["folder"]
    for worker in tree["workers"].values():
        del worker["engine_args"]  # merged
        llm_args = worker["engine_config"].pop("llm_args")
        if llm_args:  # TensorRT-LLM's YAML: it has the defaults of the keys that are left out
            worker["engine_config"] = llm_args
    return tree


def sources_of(tree: Mapping[str, Any], folder: Path, layers: Sequence[Layer], base: str = "") -> dict[str, str]:
    """Return for each dotted key of `tree` what set its value; `base` names a recipe that is no file of the user's."""
    return _Search(folder, layers, base).of_all(tree)


class _Search:
    def __init__(self, folder: Path, layers: Sequence[Layer], base: str) -> None:
        self._folder, self._base = folder, base
        self._layers = [*reversed(layers)]  # the last one wins
        self._tree = recipe_tree(folder, "")
        self._source = read_sources(folder)

    def of_all(self, tree: Mapping[str, Any]) -> dict[str, str]:
        return {".".join(keys): self._find(keys) for keys in _leaves(tree)}

    def _find(self, keys: Keys) -> str:
        in_args = tuple("engine_args" if name == "engine_config" else name for name in keys)
        for layer in self._layers:
            for path in dict.fromkeys((in_args, keys)):
                if found := self._in_layer(layer, path):
                    return found
        if not _has(self._tree, keys):
            return DEFAULT
        return self._base or _place(self._source, in_args if in_args in self._source.places else keys)

    def _in_layer(self, layer: Layer, keys: Keys) -> str:
        """Return "" where it leaves the value alone."""
        node: Any = layer.tree
        for at, name in enumerate(keys):
            if isinstance(node, str) and keys[at - 1] == "engine_config":  # the name of a file, in the block's place
                source = read_source(self._folder / node)
                return _place(source, keys[at:]) if keys[at:] in source.places else DEFAULT
            if not isinstance(node, Mapping):
                break
            if name not in node:
                return ""
            node = node[name]
        return layer.name


def _place(source: YamlSource, keys: Keys) -> str:
    return str(source.find(keys))


def _leaves(tree: Mapping[str, Any], above: Keys = ()) -> Iterator[Keys]:
    for name, value in tree.items():
        keys = (*above, str(name))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, keys)
        else:
            yield keys


def _has(tree: Any, keys: Keys) -> bool:
    for name in keys:
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True
