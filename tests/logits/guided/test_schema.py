"""JSON schemas as xgrammar enforces them: exact, narrower, or refused by name."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from bireme.logits.guided.schema import rewritten
from tests.logits.guided.answers import Grammars

TEXT, WHOLE, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
KINDS = ("a", "b")
UUID, DAY = "1234567-89ab-4def-8123-456789abcdef", "2026-11-26"
CHAIN = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}]} for at in range(1000)} | {"d1000": TEXT}
NODE = {"type": "object", "properties": {"v": WHOLE, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}


@pytest.fixture(scope="module")
def grammars():
    pytest.importorskip("xgrammar")
    return Grammars()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "items": TEXT, "uniqueItems": True}, "schema: uniqueItems can't be enforced"),
        ({"properties": {"a": {"type": "number", "not": WHOLE}}}, "/properties/a: not can't be enforced"),
        ({"items": {"$ref": "http://example.com/x"}}, "/items: $ref http://example.com/x"),
        ({"anyOf": [{"pattern": "abc", "maxLength": 300}]}, "/anyOf/0: pattern abc: what it allows is too much"),
        ({"type": "string", "pattern": 'a"b'}, "quotes, backslashes and control characters"),
        ({"patternProperties": {"\\\\": TEXT}}, "quotes, backslashes and control characters"),
        ({"patternProperties": {"a": TEXT, "b": WHOLE}}, "may take the same name"),
        ({"type": "string", "pattern": "(?<!a)b"}, "pattern (?<!a)b: assert not is not supported"),
        ({"type": "string", "pattern": r"(a|b)\1"}, r"pattern (a|b)\1: groupref is not supported here"),
        ({"type": "string", "format": "date", "maxLength": 4}, "format date: no text"),
        ({"allOf": [{"pattern": "^a+$"}, {"pattern": "^b+$"}]}, "no text without quotes"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf of a fraction"),
        ({"type": "integer", "minimum": 0, "multipleOf": 5}, "multipleOf 5 can't be enforced here"),
        ({"type": "number", "minimum": 0, "maximum": 1e-9, "exclusiveMinimum": 0}, "six decimals"),
        ({"type": "object", "minProperties": 3}, "minProperties can't be enforced"),
        ({"type": "array", "contains": WHOLE}, "contains can't be enforced"),
        ({"oneOf": [{"minimum": 2}, {"maximum": 5}]}, "oneOf of schemas that may hold at once"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"enum": []}, "enum is empty"),
        ({"type": "text"}, "type text"),
        ({"type": "object", "additionalProperties": False, "required": ["zz"]}, "required zz"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer is within 3 and 2"),
        ({"type": "string", "maxLength": "3"}, "maxLength: a str"),
        ({"type": "string", "maxLength": math.inf}, "maxLength: inf"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf: 0"),
        ({"type": [{}]}, "type {}"),
        ({"type": "object", "required": [1]}, "required: a int among the names"),
        ({"dependentRequired": {"a": [{}]}}, "dependentRequired: a dict among the names"),
        ({"dependentSchemas": {"a": [1]}}, "dependentSchemas: a int among the names"),
        ({"enum": [{"a": 1}], "properties": {"a": {"minimum": "x"}}}, "minimum: a str"),
        ({"enum": ["a"], "not": {"maxLength": "x"}}, "maxLength: a str"),
        ({"$defs": CHAIN, "$ref": "#/$defs/d0"}, "nested too deeply"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, TEXT]}}}, "leads back to itself"),
        ({"$dynamicRef": "#x"}, "$dynamicRef can't be enforced"),
        ({"const": 1 << 64}, "numbers of 64 bits"),
        ({"allOf": [{"anyOf": [{"minimum": at} for at in range(40)]} for _ in range(3)]}, "alternatives"),
    ],
)
def test_what_can_t_be_enforced_is_named_with_its_place(schema, words):
    with pytest.raises(ValueError) as caught:
        rewritten(schema)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"b": 1}]),
        ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"enum": ["a", 1, True, None], "type": ["string", "integer"]}, ["a", 1], [True, None]),
        ({"enum": ["ab", "b"], "pattern": "^a"}, ["ab"], ["b"]),
        ({"const": 3, "type": "integer", "not": {"const": 4}}, [3], [4]),
        ({"maxLength": 1}, ["a"], ["ab", 1]),
        ({"format": "date", "minLength": 1}, ["2026-11-26"], ["", "today"]),
        ({"format": "uri", "minLength": 1, "maxLength": 24}, ["https://a.b/c?d=e"], ["", "https://" + 20 * "a"]),
        ({"format": "email", "maxLength": 60}, ["me@example.org"], ["me", 60 * "a" + "@example.org"]),
        ({"type": "string", "pattern": "^A"}, ["A", "Ada"], ["a", "bA"]),
        ({"type": "string", "pattern": "^foo|bar$"}, ["foox", "xbar"], ["xfoo", "barx"]),
        ({"type": "string", "pattern": "\\S", "minLength": 1}, ["ab", " a "], ["", "  "]),
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 2}, ["ab"], ["abc", ""]),
        ({"type": "string", "pattern": "^[a-z]+-[0-9]+$", "maxLength": 5}, ["a-1", "ab-12"], ["abc-12", "ab-"]),
        ({"type": "string", "pattern": "b", "maxLength": 3}, ["b", "xby"], ["abcd", "a"]),
        ({"type": "string", "pattern": "^(?!bad|x$)"}, ["", "good", "xa"], ["bad", "bads", "x"]),
        ({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{2,}$"}, ["a1", "1a"], ["ab", "1"]),
        ({"type": "string", "pattern": "^(a(?=b)|b|c$){1,3}$"}, ["ab", "bc", "b"], ["a", "ac", "cb", ""]),
        ({"allOf": [{"pattern": "^[a-z]"}, {"pattern": "[0-9]$"}]}, ["a1", "a 1"], ["1", "a", "1a"]),
        (
            {"type": "string", "format": "email", "pattern": "@a[.]org$"},
            ["me@a.org"],
            ["me@b.org", "@a.org", "me a.org"],
        ),
        ({"type": "string", "format": "uuid", "pattern": "^0"}, [f"0{UUID}"], [f"1{UUID}", "0"]),
        (
            {"type": "string", "format": "date-time", "pattern": "Z$"},
            [f"{DAY}T10:00:00Z"],
            [f"{DAY}T10:00:00+01:00", "Z"],
        ),
        ({"type": "string", "format": "time", "pattern": "^[0-9]{2}:[0-9]{2}$"}, ["10:30"], ["10:30Z", "10"]),
        ({"type": "string", "format": "no-such", "pattern": "^a"}, ["ab"], ["b"]),
        ({"patternProperties": {"^s_": TEXT}, "additionalProperties": False}, [{"s_a": "x"}], [{"s_a": 1}, {"a": "x"}]),
        (
            {"properties": {"a": WHOLE}, "patternProperties": {"^x": TEXT}, "additionalProperties": NULL},
            [{"a": 1, "x": "b", "c": None}],
            [{"a": None}, {"x": None}, {"c": 1}],
        ),
        (
            {"allOf": [{"properties": {"a": WHOLE}}, {"properties": {"a": {"minimum": 3}}, "required": ["a"]}]},
            [{"a": 3}],
            [{"a": 2}, {}],
        ),
        ({"$ref": "#/$defs/x", "maximum": 3, "$defs": {"x": {"$ref": "#y"}, "y": {"$anchor": "y", **WHOLE}}}, [3], [4]),
        ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, [{"v": 1, "next": {"v": 2}}], [{"v": 1, "next": {}}]),
        ({"anyOf": [TEXT, WHOLE], "minimum": 3}, ["a", 3], [2]),
        (
            {"oneOf": [{"properties": {"k": {"const": at}}, "required": ["k"]} for at in KINDS]},
            [{"k": "b"}],
            [{"k": "c"}],
        ),
        ({"dependentRequired": {"a": ["b"]}, "properties": {"a": WHOLE, "b": WHOLE}}, [{"b": 1}, {}], [{"a": 1}]),
        ({"properties": {"a": WHOLE}, "not": {"required": ["b"]}}, [{"a": 1}], [{"b": 1}]),
        ({"type": ["string", "integer"], "not": WHOLE}, ["a"], [1]),
        ({"properties": {"a": WHOLE}, "unevaluatedProperties": TEXT}, [{"a": 1, "b": "x"}], [{"b": 1}]),
        ({"type": "number", "multipleOf": 4}, [8], [6, 8.5]),
        ({"type": "array", "minItems": 2}, [[1, "a"]], [[1]]),
        ({"items": [WHOLE, TEXT], "additionalItems": False}, [[1, "a"]], [["a", 1], [1, "a", 2]]),
        ({"propertyNames": {"enum": ["a"]}, "minProperties": 1}, [{"a": 1}], [{"b": 1}, {}]),
        ({"properties": {"not": TEXT, "if": WHOLE}, "required": ["not"]}, [{"not": "a"}], [{}]),
        (True, ["a", {}], []),
    ],
)
def test_an_answer_can_be_what_the_schema_allows_and_nothing_else(grammars, schema, allowed, forbidden):
    grammar = grammars.of(schema)
    assert [one for one in allowed if not grammars.can_be(grammar, json.dumps(one))] == []
    assert [one for one in forbidden if grammars.can_be(grammar, json.dumps(one))] == []


def test_a_name_in_escapes_does_not_get_round_its_schema(grammars):
    grammar = grammars.of({"properties": {"a": WHOLE}, "additionalProperties": True})
    assert grammars.can_be(grammar, '{"a": 1, "ab": "x"}')
    assert not grammars.can_be(grammar, '{"a": 1, "\\u0061": "x"}')
    assert not grammars.can_be(grammar, '{"a": 1, "a": "x"}')


@pytest.mark.parametrize("name", ["json-pointer", "email", "date-time", "uri", "uri-template", "duration"])
def test_a_format_s_answers_are_json(grammars, name):
    grammar, rng = grammars.of({"type": "string", "format": name}), random.Random(0)
    for _ in range(20):
        if (text := grammars.answer(grammar, rng)) is not None:
            assert isinstance(json.loads(text), str)


def test_a_loose_schema_is_held_to_what_can_be_enforced(grammars):
    tags = {"type": "array", "uniqueItems": True, "items": {"type": "string", "minLength": 1, "pattern": "(?<!x)$"}}
    made, left_out = rewritten({"type": "object", "properties": {"tags": tags}, "required": ["tags"]}, is_loose=True)
    assert [reason.split(" ")[:2] for reason in left_out] == [
        ["/properties/tags/items:", "pattern"],
        ["/properties/tags:", "uniqueItems"],
    ]
    assert grammars.can_be(grammars.of(made), '{"tags": ["x", "x"]}')
    assert not grammars.can_be(grammars.of(made), '{"tags": [""]}')


def test_a_loose_schema_s_misshapen_keyword_is_left_out():
    made, left_out = rewritten({"type": "object", "required": [1]}, is_loose=True)
    assert made == {"type": "object"} and left_out[0].startswith("schema: required")


def test_loose_alternatives_stay_alternatives(grammars):
    made, left_out = rewritten({"oneOf": [{"type": "number", "minimum": 2}, WHOLE]}, is_loose=True)
    assert len(left_out) == 1 and not grammars.can_be(grammars.of(made), '"a"')


def test_a_loose_schema_that_nothing_satisfies_is_refused():
    with pytest.raises(ValueError, match="cannot accept any value"):
        rewritten({"type": "integer", "minimum": 3, "maximum": 2}, is_loose=True)


def test_loosening_is_logged_and_strict_is_refused(caplog):
    pytest.importorskip("xgrammar")
    content: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    for loose, first in (({"is_loose": True}, b"+"), ({}, b"-")):
        tag = {"type": "structural_tag", "format": {**content, **loose}}
        assert Grammars().compile("structural_tag", tag)[:1] == first
    assert [record.message.split(" ")[0] for record in caplog.records] == ["guide_loosened"]


def test_depth_and_loops_end(grammars):
    schema: Any = TEXT
    for _ in range(60):
        schema = {"anyOf": [{"items": schema, "type": "array"}, {"type": "null"}]}
    assert grammars.of(schema)
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    with pytest.raises(ValueError, match="leads back to itself"):
        rewritten(loop)
