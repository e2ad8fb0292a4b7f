"""What guided_decoding may say."""

from __future__ import annotations

from typing import Any

import pytest

from bireme.config import Limits
from bireme.errors import RequestError
from bireme.guides import parse_guide

LIMITS = Limits(max_guide_bytes=1000, max_guide_depth=10, max_guide_choices=3)


def deep(levels):
    tree: Any = {}
    for _ in range(levels):
        tree = {"a": tree}
    return tree


def test_a_schema_may_come_as_an_object_or_as_its_text():
    assert parse_guide({"json": {"type": "null"}}, LIMITS) == parse_guide({"json": '{"type":  "null"}'}, LIMITS)


def test_guides_that_differ_have_other_keys():
    raws = [{"regex": "a"}, {"grammar": "a"}, {"regex": "b"}, {"json": {"a": 1, "b": 1}}, {"json": {"b": 1, "a": 1}}]
    assert len({parse_guide(raw, LIMITS).grammar_key for raw in raws}) == len(raws)


def test_the_end_of_the_reasoning_does_not_change_the_grammar():
    plain, free = ({"regex": "a"} | extra for extra in ({}, {"reasoning_end": "</think>"}))
    assert parse_guide(plain, LIMITS).grammar_key == parse_guide(free, LIMITS).grammar_key
    assert parse_guide(free, LIMITS).reasoning_end == "</think>"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("regex", "a str; send an object with exactly one of"),
        ({}, "none; send an object with exactly one of"),
        ({"regex": "a", "json": {}}, "regex, json; send an object with exactly one of"),
        ({"sql": "a"}, "sql; send an object with exactly one of"),
        ({"regex": ""}, "guided_decoding.regex: a str; send a text that is not empty"),
        ({"regex": 7}, "a int; send a text"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a" * 1001}, "1001 bytes; limits.max_guide_bytes is 1000"),
        ({"json": [1]}, "a JSON list; send an object"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[" * 900}, "not valid JSON"),
        ({"json": {"minimum": float("nan")}}, "send plain JSON"),
        ({"json": deep(10)}, "nested more than 10 deep (limits.max_guide_depth)"),
        ({"json": {"enum": ["a" * 1000]}}, "limits.max_guide_bytes is 1000"),
        ({"json_object": False}, "only true makes sense"),
        ({"choice": "abc"}, "send a list of texts"),
        ({"choice": []}, "at least one"),
        ({"choice": ["a", 1]}, "every entry must be a text"),
        ({"choice": list("abcd")}, "4 texts; limits.max_guide_choices is 3"),
        ({"regex": "a", "reasoning_end": 1}, "guided_decoding.reasoning_end"),
        ({"regex": "a", "reasoning_end": "x" * 257}, "at most 256 characters"),
    ],
)
def test_a_wrong_guide_is_refused_with_its_remedy(raw, words):
    with pytest.raises(RequestError, match="guided_decoding") as caught:
        parse_guide(raw, LIMITS)
    assert words in str(caught.value)


def test_a_schema_deeper_than_python_s_stack_is_refused():
    with pytest.raises(RequestError, match="nested more than 64 deep"):
        parse_guide({"json": deep(5000)}, Limits())
