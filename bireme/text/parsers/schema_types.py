"""Which JSON types a parameter's schema allows, and its text as JSON of one of them.

Tags carry text alone. References, unions, constants and nullable are looked through. What can't be told (a reference to
elsewhere, a schema that goes round in circles) allows every type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bireme.text.parsers.json_text import json_text
from bireme.text.parsers.python_literals import literal, syntax_tree

MAX_LITERAL = 1 << 16  # characters of one, a bound for Python's parser
MAX_SCHEMAS = 256  # looked at for one parameter; more count as "every type"
_KINDS: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    type(None): frozenset({"null"}),
}
ANY = frozenset().union(*_KINDS.values())
_TEXT = frozenset({"string"})
_NAMED = {"number": frozenset({"number", "integer"})} | {kind: frozenset({kind}) for kind in ANY - {"number"}}
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models write


@dataclass(frozen=True, slots=True)
class ValueType:
    """What a value may be."""

    kinds: frozenset[str] = _TEXT
    texts: frozenset[str] = frozenset()  # of its enum or const: such a text is itself, whatever else it looks like

    @property
    def is_text(self) -> bool:
        """Whether a value is a string whatever its text is."""
        return self.kinds <= _TEXT

    def as_json(self, text: str) -> str:
        """Return a value's text as JSON. A text that fits no other type is a string."""
        if self.is_text or text in self.texts:
            return json_text(text)
        try:
            value = _value_of(text)
            if _kinds_of(value) & self.kinds - _TEXT:
                return json_text(value)
        except (ValueError, RecursionError):
            pass
        return json_text(text)


TEXT = ValueType()
UNSTATED = ValueType()  # a text, as no schema says what it is
NOT_TEXT = ValueType(ANY)  # strings stand unquoted, so what reads as JSON is no string


class FunctionTypes:
    """The types of one function's parameters, or of what one of them holds."""

    def __init__(self, schema: Any, parts: Sequence[Any] | None = None) -> None:
        self._root = schema
        self._tops = [schema] if parts is None else parts
        self._num_left = MAX_SCHEMAS

    def of(self, key: str) -> ValueType:
        """Return a parameter's type. One that the schema does not know, or says nothing about, is a text."""
        return self._type(self._schemas_of(key))

    def of_items(self) -> ValueType:
        """Return the type of a list's items."""
        return self._type(self._item_schemas())

    def within(self, key: str) -> FunctionTypes:
        """Return the types of what a parameter holds."""
        return FunctionTypes(self._root, self._schemas_of(key))

    def items(self) -> FunctionTypes:
        """Return the types of what a list's items hold."""
        return FunctionTypes(self._root, self._item_schemas())

    def keys(self) -> frozenset[str]:
        """Return the parameters that the schema names."""
        self._num_left = MAX_SCHEMAS
        return frozenset(name for top in self._tops for name in self._names(top))

    def _schemas_of(self, key: str) -> list[Any]:
        self._num_left = MAX_SCHEMAS
        return [schema for top in self._tops for schema in self._properties(top, key)]

    def _item_schemas(self) -> list[Any]:
        self._num_left = MAX_SCHEMAS
        return [part["items"] for top in self._tops for part in self._parts(top) if isinstance(part.get("items"), dict)]

    def _type(self, schemas: list[Any]) -> ValueType:
        self._num_left = MAX_SCHEMAS
        if not any(isinstance(schema, dict) and schema for schema in schemas):
            return UNSTATED
        kinds = frozenset().union(*map(self._kinds, schemas))
        self._num_left = MAX_SCHEMAS
        texts = frozenset(text for schema in schemas for text in self._texts(schema))
        return ValueType(kinds, texts)

    def _names(self, schema: Any) -> Iterator[str]:
        for part in self._parts(schema):
            properties = part.get("properties")
            yield from properties if isinstance(properties, dict) else ()

    def _properties(self, schema: Any, key: str) -> Iterator[Any]:
        """Yield what is said of a parameter: in the schema itself, its references and its branches."""
        for part in self._parts(schema):
            properties, others = part.get("properties"), part.get("additionalProperties")
            if isinstance(properties, dict) and key in properties:
                yield properties[key]
            elif isinstance(others, dict):
                yield others

    def _parts(self, schema: Any) -> Iterator[dict[str, Any]]:
        """Yield a schema and all that it is made of."""
        self._num_left -= 1
        if not isinstance(schema, dict) or self._num_left < 0:
            return
        yield schema
        for part in (*self._referred(schema), *_branches(schema, "allOf", "anyOf", "oneOf")):
            yield from self._parts(part)

    def _kinds(self, schema: Any) -> frozenset[str]:
        self._num_left -= 1
        if not isinstance(schema, dict) or self._num_left < 0:
            return ANY
        kinds = _stated_kinds(schema)
        for part in (*self._referred(schema), *_branches(schema, "allOf")):
            kinds &= self._kinds(part)
        for union in ("anyOf", "oneOf"):
            if branches := _branches(schema, union):
                kinds &= frozenset().union(*map(self._kinds, branches))
        return kinds | {"null"} if schema.get("nullable") is True else kinds

    def _texts(self, schema: Any) -> Iterator[str]:
        for part in self._parts(schema):
            yield from (value for value in _constants(part) if isinstance(value, str))

    def _referred(self, schema: dict[str, Any]) -> list[Any]:
        """Return what `$ref` points to within the function's schema: one, or none that can be told."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return []
        node = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, dict) or step not in node:
                return []
            node = node[step]
        return [node]


def _stated_kinds(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema itself leaves."""
    kinds, stated = ANY, schema.get("type")
    names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    if names:
        kinds = frozenset().union(*(_NAMED.get(name, _TEXT) for name in names if isinstance(name, str)))
    if "const" in schema or isinstance(schema.get("enum"), list):
        kinds &= frozenset().union(*map(_kinds_of, _constants(schema)))
    return kinds


def _constants(schema: dict[str, Any]) -> list[Any]:
    values = schema.get("enum")
    return [schema["const"]] if "const" in schema else values if isinstance(values, list) else []


def _branches(schema: dict[str, Any], *words: str) -> list[Any]:
    return [branch for word in words for branch in (schema[word] if isinstance(schema.get(word), list) else ())]


def _kinds_of(value: Any) -> frozenset[str]:
    """Return the types that a value has: 2.0 is an integer too."""
    kinds = _KINDS.get(type(value), ANY)
    return kinds | {"integer"} if isinstance(value, float) and value.is_integer() else kinds


def _value_of(text: str) -> Any:
    """Read JSON, or a list or an object as Python writes it, which templates teach. Raises ValueError."""
    try:
        return json.loads(_WORDS.get(text.strip(), text), parse_constant=_refuse)
    except ValueError:
        if not text.lstrip().startswith(("[", "{")) or len(text) > MAX_LITERAL:
            raise
        return literal(syntax_tree(text))


def _refuse(word: str) -> None:
    raise ValueError(word)
