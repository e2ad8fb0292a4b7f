"""Arguments of MiniMax M3: elements within elements, typed by the function's schema."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.text.parsers import create_parser, tool_format
from bireme.text.parsers.base import ParserRequest
from tests.text.parsers.answers import render_calls
from tests.text.parsers.test_parsers import calls_of, content_of, joined

TAG = "]<]minimax[>["
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "name": {"type": "string"}, "item": {}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "point": {"$ref": "#/$defs/Point"},
        "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "maybe": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "either": {"type": ["string", "object"]},
        "free": {},
        "tree": {"type": "object", "properties": {"tree": {"type": "object"}, "leaf": {"type": "boolean"}}},
        "last": {"type": "integer"},
    },
    "$defs": {"Point": POINT},
}
FUNCTION = {"name": "f", "parameters": SCHEMA}


def read(text, size=1 << 30, is_cut=False):
    parser = create_parser(None, tool_format("minimax_m3"), ParserRequest((FUNCTION,)))
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    return joined(events + parser.close(is_cut))


VALUES = [
    {"point": {"x": 1, "name": "12"}},
    {"point": {"name": "", "item": "a"}},
    {"point": {}},
    {"points": [{"x": 1}, {"x": -2, "name": "a < b\n"}]},
    {"points": []},
    {"rows": [[1, 2.5], [3], []]},
    {"maybe": ["1", "", " two\nlines "]},
    {"either": "12"},
    {"either": {"a": "1"}},
    {"free": "1"},
    {"free": {"a": {"b": "1"}, "c": ["1", "2"]}},
    {"tree": {"tree": {"tree": {"leaf": "x"}}, "leaf": False}},
    {"text": "]<]", "point": {"x": 1}},
    {"text": "]<]minimax[>[", "last": 3},
    {"text": "</text> <item>", "last": 3},
]


@pytest.mark.parametrize("arguments", VALUES, ids=str)
def test_what_elements_hold_is_read_by_its_schema_wherever_it_is_cut(arguments):
    text = render_calls("minimax_m3", [("f", arguments), ("f", {"last": 1})])
    for size in range(1, len(text) + 1):
        events = read(text, size)
        assert (calls_of(events), content_of(events)) == ([("f", arguments), ("f", {"last": 1})], "")


WORDS = st.text(st.sampled_from("ab]<[>/é\n 1"), max_size=6).filter(lambda text: "]<]" not in text)
POINTS = st.fixed_dictionaries({}, optional={"x": st.integers(-9, 99), "name": WORDS})
ARGUMENTS = st.fixed_dictionaries(
    {"text": WORDS},
    optional={
        "point": POINTS,
        "points": st.lists(POINTS, max_size=3),
        "rows": st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
        "maybe": st.lists(WORDS, max_size=3),
        "last": st.integers(0, 9),
    },
)


@settings(max_examples=100, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=2), st.integers(1, 9))
def test_any_nested_arguments_are_read_back(arguments, size):
    calls = [("f", each) for each in arguments]
    events = read(render_calls("minimax_m3", calls), size)
    assert (calls_of(events), content_of(events)) == (calls, "")


DAMAGED = [
    (f"{TAG}<point>{TAG}<x>1{TAG}</x>{TAG}<last>3{TAG}</last>", {"point": {"x": 1}, "last": 3}),  # no </point>
    (f"{TAG}<point>{TAG}<x>1{TAG}<name>a{TAG}</name>{TAG}</point>", {"point": {"x": 1, "name": "a"}}),  # no </x>
    (f"{TAG}<point>{TAG}<x>1{TAG}</y>{TAG}</point>", {"point": {"x": 1}}),
    (f"{TAG}<point>{TAG}<x>1{TAG}</x>{TAG}</pint>", {"point": {"x": 1}}),
    (f"{TAG}<points>{TAG}<item>{TAG}<x>1{TAG}</x>{TAG}</points>", {"points": [{"x": 1}]}),  # no </item>
    (f"{TAG}<rows>{TAG}<item>{TAG}<item>1{TAG}</item>{TAG}</item>", {"rows": [[1]]}),  # no </rows>
    (f"{TAG}<last>3", {"last": 3}),
    (f"{TAG}<last>{TAG}<text>a{TAG}</text>", {"last": "", "text": "a"}),
    (f"{TAG}<free>{TAG}<a>1{TAG}</a>{TAG}<a>2{TAG}</a>{TAG}</free>", {"free": {"a": ["1", "2"]}}),
]


@pytest.mark.parametrize(("inner", "arguments"), DAMAGED)
@pytest.mark.parametrize("end", [f"{TAG}</invoke>\n{TAG}</tool_call>", f"{TAG}</tool_call>", ""])
def test_an_element_whose_end_is_missing_or_damaged_ends_where_another_tag_follows(inner, arguments, end):
    text = f'{TAG}<tool_call>\n{TAG}<invoke name="f">{inner}{end}'
    for size in range(1, len(text) + 1):
        events = read(text, size)
        assert (calls_of(events), content_of(events)) == ([("f", arguments)], "")


def test_an_answer_that_is_cut_anywhere_stays_json():
    text = render_calls("minimax_m3", [("f", VALUES[3] | {"text": "a", "tree": VALUES[11]["tree"]})])
    for at in range(len(text)):
        whole = read(text[:at])
        assert read(text[:at], 5) == whole
        calls_of(whole)


def test_elements_too_deep_are_content_again():
    text = f'{TAG}<invoke name="f">{TAG}<free>' + f"{TAG}<a>" * 100
    events = read(text)
    assert len(calls_of(events)) == 1 and f"{TAG}<a>" in content_of(events)
    assert read(text, 3) == events
