"""JSON schemas that can and can't be held to."""

from __future__ import annotations

from typing import Any

import pytest

from bireme.logits.guided.schema import check_schema, schemas_of

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "items": TEXT, "uniqueItems": True}, "schema: uniqueItems can't be enforced"),
        ({"properties": {"a": {"not": TEXT}}}, "/properties/a: not can't be enforced"),
        ({"$defs": {"x": {"allOf": [TEXT, TEXT]}}}, "/$defs/x: allOf of several"),
        ({"anyOf": [{"pattern": "a+", "maxLength": 3}]}, "/anyOf/0: pattern and a length"),
        ({"items": {"$ref": "http://example.com/x"}}, "/items: $ref http://example.com/x"),
        ({"$ref": "#/$defs/x", "minimum": 3}, "minimum beside $ref"),
        ({"anyOf": [TEXT], "required": ["a"]}, "required beside anyOf"),
        ({"pattern": 'a"b'}, "quotes and backslashes"),
        ({"patternProperties": {"\\\\": TEXT}}, "quotes and backslashes"),
    ],
)
def test_what_can_t_be_enforced_is_named_with_its_place(schema, words):
    with pytest.raises(ValueError) as caught:
        check_schema(schema)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"properties": {"not": TEXT, "if": TEXT, "uniqueItems": {"type": "boolean"}}, "required": ["not"]},
        {"enum": [{"not": 1}], "const": {"if": 2}, "default": {"contains": 3}},
        {"anyOf": [TEXT, {"type": "null"}], "default": None, "title": "Name"},
        {"$ref": "#/$defs/x", "description": "that one", "$defs": {"x": TEXT}},
        {"uniqueItems": False, "type": "array"},
        {"allOf": [TEXT], "title": "One"},
    ],
)
def test_what_can_be_enforced_passes(schema):
    check_schema(schema)


def test_the_schemas_of_a_tag_are_found():
    tag = {"format": {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": TEXT}, {"tags": []}]}}
    assert list(schemas_of(tag)) == [TEXT]


def test_depth_is_no_matter():
    schema: Any = {"not": TEXT}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="not can't be enforced"):
        check_schema(schema)
