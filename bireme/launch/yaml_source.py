"""Where each key of a YAML file stands, so that a finding can name file and line.

It fails on no file that YAML can read, and reports keys that are written twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from bireme import yaml_text

Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Repeated:
    """A key that one mapping has twice; the second counts."""

    keys: Keys
    first: Place
    second: Place


@dataclass(slots=True)
class YamlSource:
    """Of one file, and the files that it includes."""

    file: Path
    places: dict[Keys, Place] = field(default_factory=dict)
    repeated: list[Repeated] = field(default_factory=list)

    def include(self, keys: Keys, other: YamlSource) -> None:
        """Add another file's keys below `keys`."""
        self.places |= {(*keys, *inner): place for inner, place in other.places.items() if inner}
        self.repeated += [Repeated((*keys, *one.keys), one.first, one.second) for one in other.repeated]

    def find(self, keys: Keys) -> Place:
        """Of a missing key where its block begins."""
        while keys and keys not in self.places:
            keys = keys[:-1]
        return self.places.get(keys, Place(self.file, 1))


def read_source(file: Path) -> YamlSource:
    """Raises yaml.YAMLError and OSError."""
    source = YamlSource(file)
    with file.open(encoding="utf-8") as stream:  # a stream, so that PyYAML's errors name the file
        root = yaml_text.compose(stream)
    if root is not None:
        for keys, node in _walk(root, ()):
            place = Place(file, node.start_mark.line + 1)
            if keys in source.places:
                source.repeated.append(Repeated(keys, source.places[keys], place))
            source.places[keys] = place
    return source


def _walk(node: yaml.Node, keys: Keys, within: tuple[yaml.Node, ...] = ()) -> Iterator[tuple[Keys, yaml.Node]]:
    """Of a block within itself (by an alias) only the first."""
    if not isinstance(node, yaml.MappingNode) or any(node is outer for outer in within):
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            path = (*keys, key.value)
            yield path, key
            yield from _walk(value, path, (*within, node))
