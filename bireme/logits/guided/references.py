"""What `$ref` names inside one schema: pointers, anchors and embedded documents with an `$id` of their own.

Schemas are told apart by identity, not by text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urljoin

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else"),
)
_MAX_PLACE = 120


class UnsupportedError(ValueError):
    """A keyword that can't be enforced; `schema` is the object that has it."""

    def __init__(self, schema: dict[str, Any], keyword: str, reason: str) -> None:
        super().__init__(reason)
        self.schema = schema
        self.keyword = keyword
        self.reason = reason


class Document:
    """A schema with its places. The walk does not recurse, and a property named `not` is just a property."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._bases: dict[int, str] = {}  # of each schema: the address that its references begin at
        self._places: dict[int, str] = {}
        self._found: dict[str, Any] = {"": root}  # by address, with `#` before an anchor
        self._index("", "", root)

    def place(self, schema: dict[str, Any]) -> str:
        return self._places.get(id(schema), "") or "schema"

    def follow(self, schema: dict[str, Any]) -> Any:
        """Return what its `$ref` names. Raises UnsupportedError."""
        reference, base = schema["$ref"], self._bases.get(id(schema), "")
        if not isinstance(reference, str):
            raise UnsupportedError(schema, "$ref", f"$ref: a {type(reference).__name__}; send a text")
        whole = base + reference if reference.startswith("#") else urljoin(base, reference)
        address, _, fragment = whole.partition("#")
        missing = UnsupportedError(
            schema, "$ref", f"$ref {reference[:60]}: there is no such place; only references into the schema itself,"
            " #/..., are followed",
        )  # fmt: skip
        if address not in self._found:
            raise missing
        if fragment and not fragment.startswith("/"):
            if whole not in self._found:
                raise missing
            return self._found[whole]
        node = self._found[address]
        for part in fragment.split("/")[1:]:
            node = _inside(node, unquote(part).replace("~1", "/").replace("~0", "~"), missing)
        if isinstance(node, dict) and id(node) not in self._bases:
            self._index(fragment, address, node)  # outside of what the walk takes for schemas
        return node

    def _index(self, place: str, base: str, root: Any) -> None:
        waiting = [(place, base, root)]
        while waiting:
            place, base, node = waiting.pop()
            if not isinstance(node, dict) or id(node) in self._bases:
                continue
            name = node.get("$id")
            if isinstance(name, str) and name.startswith("#"):  # an anchor, in drafts 6 and 7
                self._found.setdefault(base + name, node)
            elif isinstance(name, str):
                base = urljoin(base, name).partition("#")[0]
                self._found.setdefault(base, node)
            for anchor in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(anchor), str):
                    self._found.setdefault(f"{base}#{node[anchor]}", node)
            self._bases[id(node)] = base
            self._places[id(node)] = place
            waiting += [(f"{place}/{step}"[-_MAX_PLACE:], base, inner) for step, inner in _inner(node)]


def _inner(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _MAPS:
        if isinstance(inner := node.get(name), dict):
            yield from ((f"{name}/{key}", value) for key, value in inner.items())
    for name in _LISTS:
        if isinstance(inner := node.get(name), list):
            yield from ((f"{name}/{at}", value) for at, value in enumerate(inner))
    for name in _SINGLE:
        yield name, node.get(name)


def _inside(node: Any, part: str, missing: UnsupportedError) -> Any:
    if isinstance(node, dict) and part in node:
        return node[part]
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return node[int(part)]
    raise missing
