"""Which JSON schemas can be enforced: keywords that xgrammar silently ignores are refused by name.

The walk knows where schemas are inside a schema, so that a property named `not` is just a property, and it does not
recurse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_REFUSED = (
    *("uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
_NOTES = frozenset({"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"})
_BESIDE = _NOTES | {"$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "type", "nullable"}
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")  # what stands beside them would be lost


def check_schema(schema: Any) -> None:
    """Raise ValueError with the keyword, its place and the remedy."""
    found: list[tuple[str, Any]] = [("", schema)]
    while found:
        place, node = found.pop()
        if isinstance(node, dict):
            if problem := _problem(node):
                raise ValueError(f"{place or 'schema'}: {problem}")
            found += _inner(place, node)


def schemas_of(tag: Any) -> Iterator[Any]:
    found = [tag]
    while found:
        node = found.pop()
        if isinstance(node, list):
            found += node
        elif isinstance(node, dict):
            if "json_schema" in node:
                yield node["json_schema"]
            found += [value for name, value in node.items() if name != "json_schema"]


def _inner(place: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _MAPS:
        if isinstance(inner := node.get(name), dict):
            yield from ((f"{place}/{name}/{key}"[-120:], value) for key, value in inner.items())
    for name in _LISTS:
        if isinstance(inner := node.get(name), list):
            yield from ((f"{place}/{name}/{at}"[-120:], value) for at, value in enumerate(inner))
    for name in _SINGLE:
        yield f"{place}/{name}"[-120:], node.get(name)


def _problem(node: dict[str, Any]) -> str:
    for name in _REFUSED:
        if node.get(name) not in (None, False):
            return f"{name} can't be enforced; leave it out and check the answer"
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
        return "allOf of several schemas can't be enforced; merge them"
    if "pattern" in node and ("minLength" in node or "maxLength" in node):
        return "pattern and a length together can't be enforced; put the length into the pattern, as in ^[a-z]{2,5}$"
    reference = node.get("$ref")
    if reference is not None and not str(reference).startswith("#"):
        return f"$ref {str(reference)[:60]}: only references into the schema itself, #/..., are followed"
    for name in _ALONE:
        if name in node and (lost := sorted(map(str, node.keys() - _BESIDE - {name}))):
            return f"{lost[0]} beside {name} can't be enforced; put it into the schemas there"
    return _pattern_problem(node)


def _pattern_problem(node: dict[str, Any]) -> str:
    """xgrammar does not escape quotes and backslashes of patterns in JSON."""
    keyed = node.get("patternProperties")
    for pattern in (node.get("pattern"), *(keyed if isinstance(keyed, dict) else ())):
        if isinstance(pattern, str) and ('"' in pattern or "\\\\" in pattern):
            return f"pattern {pattern[:60]}: quotes and backslashes are not supported in patterns"
    return ""
