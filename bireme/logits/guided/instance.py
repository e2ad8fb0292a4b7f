"""Whether a value satisfies a schema: which values of an `enum` are left, which names an object may have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from bireme.logits.guided.keywords import check, types_of
from bireme.logits.guided.patterns import search
from bireme.logits.guided.references import Document, UnsupportedError

Schema = dict[str, Any]

_MAX_DEPTH = 200
_UNKNOWN = ("$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems")
_JOINS: dict[str, Callable[[list[bool]], bool]] = {"allOf": all, "anyOf": any, "oneOf": lambda found: sum(found) == 1}


class Instances:
    """Judges by one document. Raises UnsupportedError for what it does not know."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._judges: dict[str, Callable[[Any, Schema, int], bool]] = {
            "string": self._string,
            "number": _is_number_within,
            "integer": _is_number_within,
            "object": self._object,
            "array": self._array,
        }

    def satisfies(self, value: Any, schema: Any, depth: int = 0) -> bool:
        if not isinstance(schema, dict):
            return schema is True
        check(schema)
        if depth > _MAX_DEPTH:
            raise UnsupportedError(schema, "$ref", "$ref: it leads back to itself")
        for name in _UNKNOWN:
            if name in schema:
                raise UnsupportedError(schema, name, f"{name} beside enum or const can't be enforced; leave it out")
        if not (_is_named(value, schema) and self._joins(value, schema, depth + 1)):
            return False
        judge = self._judges.get(type_of(value))
        return judge is None or judge(value, schema, depth + 1)

    def _joins(self, value: Any, schema: Schema, depth: int) -> bool:
        if "$ref" in schema and not self.satisfies(value, self._document.follow(schema), depth):
            return False
        if "if" in schema:
            then = "then" if self.satisfies(value, schema["if"], depth) else "else"
            if not self.satisfies(value, schema.get(then, True), depth):
                return False
        for keyword in filter(schema.__contains__, _JOINS):
            if not _JOINS[keyword]([self.satisfies(value, one, depth) for one in schema[keyword]]):
                return False
        return not ("not" in schema and self.satisfies(value, schema["not"], depth))

    def _string(self, value: str, schema: Schema, depth: int) -> bool:
        is_found = "pattern" not in schema or self._matches(schema, "pattern", schema["pattern"], value)
        return is_found and _has_size(value, schema, "Length")

    def _matches(self, schema: Schema, keyword: str, pattern: str, text: str) -> bool:
        try:
            return search(pattern, text)
        except ValueError as error:
            raise UnsupportedError(schema, keyword, f"pattern {pattern[:60]}: it can't be read ({error})") from error

    def _object(self, value: Schema, schema: Schema, depth: int) -> bool:
        names, schemas = _needs(value, schema)
        if not _has_size(value, schema, "Properties") or not names <= value.keys():
            return False
        return all(self.satisfies(value, one, depth) for one in schemas) and all(
            self.satisfies(name, schema.get("propertyNames", True), depth)
            and all(self.satisfies(inner, one, depth) for one in self.of_property(name, schema))
            for name, inner in value.items()
        )

    def of_property(self, name: str, schema: Schema) -> list[Any]:
        found = [schema["properties"][name]] if name in schema.get("properties", ()) else []
        found += [
            inner
            for pattern, inner in schema.get("patternProperties", {}).items()
            if self._matches(schema, "patternProperties", pattern, name)
        ]
        return found if found or "additionalProperties" not in schema else [schema["additionalProperties"]]

    def _array(self, value: list[Any], schema: Schema, depth: int) -> bool:
        if not _has_size(value, schema, "Items"):
            return False
        if schema.get("uniqueItems") and any(itertools.starmap(same, itertools.combinations(value, 2))):
            return False
        if "contains" in schema:
            found = sum(self.satisfies(one, schema["contains"], depth) for one in value)
            if not schema.get("minContains", 1) <= found <= schema.get("maxContains", found):
                return False
        first, rest = tuple_of(schema)
        return all(self.satisfies(one, first[at] if at < len(first) else rest, depth) for at, one in enumerate(value))


def tuple_of(schema: Schema) -> tuple[list[Any], Any]:
    """Return the schemas of an array's first items and of all others, of any draft."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and true is not 1."""
    if type_of(one) != type_of(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return bool(one == other)


def type_of(value: Any) -> str:
    """Return the narrowest type; 1.0 is an integer."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _TYPES[type(value)]


_TYPES = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


def _is_named(value: Any, schema: Schema) -> bool:
    types = types_of(schema)
    return (
        (types is None or type_of(value) in types)
        and ("const" not in schema or same(value, schema["const"]))
        and ("enum" not in schema or any(same(value, one) for one in schema["enum"]))
    )


def _has_size(value: Any, schema: Schema, of: str) -> bool:
    return bool(schema.get(f"min{of}", 0) <= len(value) <= schema.get(f"max{of}", len(value)))


def _needs(value: Schema, schema: Schema) -> tuple[set[str], list[Any]]:
    """Return the names that must be beside these properties, and the schemas that must hold."""
    names, schemas = set(schema.get("required", ())), []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for needed in (needed for name, needed in schema.get(keyword, {}).items() if name in value):
            if isinstance(needed, list):
                names.update(needed)
            else:
                schemas.append(needed)
    return names, schemas


def _is_number_within(value: Any, schema: Schema, depth: int) -> bool:
    if "multipleOf" in schema and Fraction(str(value)) % Fraction(str(schema["multipleOf"])):
        return False
    return bool(
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )
