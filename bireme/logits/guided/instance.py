"""Whether a value satisfies a schema: which values of an `enum` are left, which names an object may have."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from bireme.logits.guided.keywords import check, types_of
from bireme.logits.guided.patterns import search
from bireme.logits.guided.references import Document, UnsupportedError

_MAX_DEPTH = 200


class Instances:
    """Judges by one document. Raises UnsupportedError for what it does not know."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def satisfies(self, value: Any, schema: Any, depth: int = 0) -> bool:
        if not isinstance(schema, dict):
            return schema is True
        check(schema)
        if depth > _MAX_DEPTH:
            raise UnsupportedError(schema, "$ref", "$ref: it leads back to itself")
        for name in ("$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems"):
            if name in schema:
                raise UnsupportedError(schema, name, f"{name} beside enum or const can't be enforced; leave it out")
        return (
            _has_type(value, schema)
            and ("const" not in schema or same(value, schema["const"]))
            and ("enum" not in schema or any(same(value, one) for one in schema["enum"]))
            and self._satisfies_others(value, schema, depth + 1)
            and self._is_within(value, schema, depth + 1)
        )

    def _satisfies_others(self, value: Any, schema: dict[str, Any], depth: int) -> bool:
        def count(schemas: Iterable[Any]) -> int:
            return sum(self.satisfies(value, one, depth) for one in schemas)

        if "$ref" in schema and not self.satisfies(value, self._document.follow(schema), depth):
            return False
        if "if" in schema:
            then = "then" if self.satisfies(value, schema["if"], depth) else "else"
            if not self.satisfies(value, schema.get(then, True), depth):
                return False
        return (
            count(schema.get("allOf", ())) == len(schema.get("allOf", ()))
            and ("anyOf" not in schema or count(schema["anyOf"]) > 0)
            and ("oneOf" not in schema or count(schema["oneOf"]) == 1)
            and ("not" not in schema or not self.satisfies(value, schema["not"], depth))
        )

    def _is_within(self, value: Any, schema: dict[str, Any], depth: int) -> bool:
        if isinstance(value, str):
            if "pattern" in schema and not self._matches(schema, "pattern", schema["pattern"], value):
                return False
            return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
        if isinstance(value, dict):
            return self._object(value, schema, depth)
        if isinstance(value, list):
            return self._array(value, schema, depth)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _is_number_within(value, schema)
        return True

    def _matches(self, schema: dict[str, Any], keyword: str, pattern: str, text: str) -> bool:
        try:
            return search(pattern, text)
        except ValueError as error:
            raise UnsupportedError(schema, keyword, f"pattern {pattern[:60]}: it can't be read ({error})") from error

    def _object(self, value: dict[str, Any], schema: dict[str, Any], depth: int) -> bool:
        if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
            return False
        if not set(schema.get("required", ())) <= value.keys():
            return False
        for name, needed in {**schema.get("dependencies", {}), **schema.get("dependentRequired", {})}.items():
            if name in value and isinstance(needed, list) and not set(needed) <= value.keys():
                return False
        for name, needed in {**schema.get("dependencies", {}), **schema.get("dependentSchemas", {})}.items():
            if name in value and not isinstance(needed, list) and not self.satisfies(value, needed, depth):
                return False
        return all(
            self.satisfies(name, schema.get("propertyNames", True), depth)
            and all(self.satisfies(inner, one, depth) for one in self.of_property(name, schema))
            for name, inner in value.items()
        )

    def of_property(self, name: str, schema: dict[str, Any]) -> list[Any]:
        """Return the schemas that an object's schema has for a property of this name."""
        found = [schema["properties"][name]] if name in schema.get("properties", ()) else []
        found += [
            inner
            for pattern, inner in schema.get("patternProperties", {}).items()
            if self._matches(schema, "patternProperties", pattern, name)
        ]
        return found if found or "additionalProperties" not in schema else [schema["additionalProperties"]]

    def _array(self, value: list[Any], schema: dict[str, Any], depth: int) -> bool:
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return False
        if schema.get("uniqueItems") and any(same(one, other) for at, one in enumerate(value) for other in value[:at]):
            return False
        if "contains" in schema:
            found = sum(self.satisfies(one, schema["contains"], depth) for one in value)
            if not schema.get("minContains", 1) <= found <= schema.get("maxContains", found):
                return False
        first, rest = tuple_of(schema)
        return all(self.satisfies(one, first[at] if at < len(first) else rest, depth) for at, one in enumerate(value))


def tuple_of(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the schemas of an array's first items and of all others, in the words of any draft."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return type(one) is type(other) and one == other or (_is_number(one) and _is_number(other) and one == other)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_type(value: Any, schema: dict[str, Any]) -> bool:
    types = types_of(schema)
    return types is None or type_of(value) in types


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _is_number_within(value: float, schema: dict[str, Any]) -> bool:
    if "multipleOf" in schema and Fraction(str(value)) % Fraction(str(schema["multipleOf"])):
        return False
    return bool(
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )
