"""The type of a value in tags is one that its parameter's resolved schema allows."""

from __future__ import annotations

import json
import time

import pytest

from bireme.text.parsers import create_parser, tool_format
from bireme.text.parsers.base import CallArguments, ParserRequest
from bireme.text.parsers.schema_types import FunctionTypes

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DEFS = {
    "Text": {"type": "string"},
    "Here/there": {"$ref": "#/$defs/Text"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}, {"type": "string"}]},
}
# schema, text, what it is
VALUES = [
    (OPTIONAL, "1234", "1234"),
    (OPTIONAL, "true", "true"),
    (OPTIONAL, "[1]", "[1]"),
    (OPTIONAL, "null", None),
    (OPTIONAL, "None", None),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": "string", "nullable": True}, "5", "5"),
    ({"$ref": "#/$defs/Text", "nullable": True}, "null", None),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5.5", "5.5"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": ["1", "2", None]}, "null", None),
    ({"enum": ["null", None]}, "null", "null"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["on", True]}, "true", True),
    ({"const": "7"}, "7", "7"),
    ({"const": 7}, "7", 7),
    ({"$ref": "#/$defs/Text"}, "42", "42"),
    ({"$ref": "#/$defs/Here~1there"}, "42", "42"),
    ({"$ref": "#"}, '{"x": 1}', {"x": 1}),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "12", "12"),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, "12", 12),
    ({"type": "integer"}, "3.0", 3.0),
    ({"type": "integer"}, "3.5", "3.5"),
    ({"type": "number"}, "3", 3),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "1", "1"),
    ({"type": "text"}, "1", "1"),
    ({"$ref": "#/$defs/nowhere"}, "1", 1),
    ({"$ref": "https://example.com/schema"}, "1", 1),
    ({"description": "anything"}, "[1]", [1]),
    ({}, "1", "1"),
    (True, "1", "1"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_a_text_gets_a_type_that_its_schema_allows(schema, text, value):
    types = FunctionTypes({"type": "object", "properties": {"it": schema}, "$defs": DEFS})
    read = json.loads(types.of("it").as_json(text))
    assert (type(read), read) == (type(value), value)


PYTHON = [
    ({"type": "array"}, "['a', \"it's\", True, None, -1.5]", ["a", "it's", True, None, -1.5]),
    ({"type": "object"}, "{'a': {'b': (1, 2)}}", {"a": {"b": [1, 2]}}),
    ({"type": ["array", "null"]}, "[f()]", "[f()]"),
    ({"type": "array"}, "[" * 70_000, "[" * 70_000),
    ({"type": "array"}, "[1e999]", "[1e999]"),
    ({"type": "integer"}, "['a']", "['a']"),
    ({"type": "string"}, "['a']", "['a']"),
]


@pytest.mark.parametrize(("schema", "text", "value"), PYTHON)
def test_lists_and_objects_may_stand_as_python_writes_them(schema, text, value):
    assert json.loads(FunctionTypes({"properties": {"it": schema}}).of("it").as_json(text)) == value


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"properties": {"it": {"type": "string"}}}}},
        {"allOf": [{"properties": {"it": {"type": "string"}}}]},
        {"anyOf": [{"properties": {"it": {"type": "string"}}}, {"properties": {"other": {"type": "integer"}}}]},
        {"additionalProperties": {"type": "string"}},
        {"properties": None},
        None,
    ],
)
def test_a_parameter_is_found_wherever_the_schema_has_it(schema):
    assert FunctionTypes(schema).of("it").as_json("1") == '"1"'


def test_a_schema_in_circles_or_of_great_size_costs_little():
    wide = {"anyOf": [{"$ref": "#/$defs/Loop"}] * 1000}
    types = FunctionTypes({"properties": {"it": wide}, "allOf": [wide] * 100, "$defs": DEFS})
    began = time.process_time()
    assert types.of("it").as_json("1") == "1"
    assert time.process_time() - began < 1


@pytest.mark.parametrize("schema", [{"enum": ["Paris", "Rome"]}, {"const": "Paris"}, {"$ref": "#/$defs/Text"}])
def test_values_that_can_only_be_texts_stream(schema):
    function = {"name": "f", "parameters": {"properties": {"city": schema}, "$defs": DEFS}}
    parser = create_parser(None, tool_format("qwen3_coder"), ParserRequest((function,)))
    events = parser.feed("<tool_call>\n<function=f>\n<parameter=city>\nPar")
    assert "".join(event.text for event in events if isinstance(event, CallArguments)) == '{"city": "Par'
