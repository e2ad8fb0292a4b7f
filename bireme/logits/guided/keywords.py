"""The keywords of JSON Schema, and what each may hold: checked before a schema is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from bireme.logits.guided.references import UnsupportedError

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KEYWORDS = {  # by the types that they speak of
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": NUMBER_KEYWORDS,
    "object": (
        *("properties", "required", "patternProperties", "additionalProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    ),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains"),
    ),
}
_SHAPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"), (dict,)
    ),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "required", "enum"), (list,)),
    **dict.fromkeys((f"{end}{of}" for of in ("Length", "Items", "Properties") for end in ("min", "max")), (int, float)),
    **dict.fromkeys(("minContains", "maxContains", *NUMBER_KEYWORDS), (int, float)),
    **dict.fromkeys(("pattern", "format"), (str,)),
}
_LONE = ("$dynamicRef", "$recursiveRef")


def check(schema: Any) -> None:
    """Raise ValueError for what is no schema, or has a keyword of the wrong form."""
    if not isinstance(schema, dict):
        raise ValueError(f"schema: a {type(schema).__name__}; send an object or a boolean")
    for keyword in _LONE:
        if keyword in schema:
            raise UnsupportedError(schema, keyword, f"{keyword} can't be enforced; send $ref")
    for keyword in filter(schema.__contains__, _SHAPES):
        if given := _misshapen(keyword, schema[keyword]):
            raise UnsupportedError(schema, keyword, f"{keyword}: {given}, which JSON Schema does not have there")
    for keyword in ("anyOf", "oneOf", "enum"):
        if schema.get(keyword) == []:
            raise ValueError(f"schema: {keyword} is empty and cannot accept any value; send at least one")
    if unknown := (types_of(schema) or set()) - set(TYPES):
        raise ValueError(f"schema: type {min(unknown)[:40]}; send one of {', '.join(TYPES)}")


def types_of(schema: dict[str, Any]) -> set[str] | None:
    """Return the types that it names, OpenAPI's `nullable` among them; None without."""
    named = schema.get("type")
    if named is None:
        return None
    types = set(map(str, named)) if isinstance(named, list) else {str(named)}
    if "number" in types:
        types.add("integer")
    return types | {"null"} if schema.get("nullable") is True else types


def _misshapen(keyword: str, value: Any) -> str:
    """Return what there is of a wrong form, if any."""
    kinds: Any = _SHAPES[keyword]
    if not isinstance(value, kinds) or isinstance(value, bool):
        return f"a {type(value).__name__}"
    if (isinstance(value, float) and not math.isfinite(value)) or (keyword == "multipleOf" and value <= 0):
        return str(value)
    odd = next((name for name in _names_in(keyword, value) if not isinstance(name, str)), "")
    return "" if odd == "" else f"a {type(odd).__name__} among the names"


def _names_in(keyword: str, value: Any) -> Iterator[Any]:
    if keyword == "required":
        yield from value
    elif keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for needed in value.values():
            yield from needed if isinstance(needed, list) else ()
