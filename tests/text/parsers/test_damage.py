"""What is read from damaged calls does not depend on luck: every mark, every damage, a stated outcome."""

from __future__ import annotations

import os
import pickle
import random

import pytest

from bireme.text.parsers import TOOLS
from tests.text.parsers.answers import render_calls
from tests.text.parsers.damage import cases, marks_of
from tests.text.parsers.test_parsers import calls_of, content_of, joined, make, parse

ROUNDS = 5 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 2  # with other arguments and letters
NUM_CASES = 4_000 * ROUNDS
DAMAGED = [tools for tools in TOOLS if marks_of(tools, {"city": "", "days": 0})]


@pytest.mark.parametrize("tools", DAMAGED)
def test_a_damaged_mark_has_its_stated_outcome_wherever_the_text_is_cut(tools):
    draw = random.Random(tools)
    for case in (case for _ in range(ROUNDS) for case in cases(tools, draw)):
        events = parse(case.text, tools=tools)
        assert calls_of(events) == ([] if case.arguments is None else [("weather", case.arguments)]), case
        if case.arguments is None:
            assert content_of(events).strip() == case.text.strip(), case
        elif case.content is not None:
            assert content_of(events).strip() == case.content.strip(), case
        assert parse(case.text, draw.randint(1, 20), tools=tools) == events, case


def test_the_damaged_calls_are_many():
    counts = [
        sum(1 for _ in range(ROUNDS) for _ in cases(tools, draw)) for tools in DAMAGED if (draw := random.Random(tools))
    ]
    assert sum(counts) >= NUM_CASES


@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("value", ["a </b>", "two\nlines"])
def test_an_answer_that_ends_anywhere_leaves_no_mark_in_a_value(tools, value):
    text = render_calls(tools, [("weather", {"city": value, "days": 3})])
    letters, found = make(tools=tools), []  # has taken all before, a letter at a time
    for at in range(len(text)):
        kept = pickle.dumps(letters)  # half of the time of a deep copy
        for is_cut in (True, False):
            events = parse(text[:at], is_cut=is_cut, tools=tools)
            assert joined(found + pickle.loads(kept).close(is_cut)) == events
        for _, arguments in calls_of(events):
            assert value.startswith(arguments.get("city", "")), at
            assert arguments.get("days", 3) in (3, "3", ""), at
        found += letters.feed(text[at])


PROSE = [
    ("qwen3_coder", "A call looks like `<function=weather>` with `<parameter=city>` inside, then `</function>`. So."),
    ("qwen3_coder", "Write <tool_call> and <function=weather>, then close them."),
    ("qwen3_coder", "It begins with <function=weather>"),
    ("minimax_m2", 'Use <invoke name="weather"> and close it.'),
    ("minimax_m2", 'Use <invoke name="weather"><parameter name="city" and so on.'),
    ("deepseek_v3.2", 'Use <｜DSML｜invoke name="weather"> here.'),
    ("glm45", "Write <tool_call>weather and then its arguments."),
    ("kimi_k3", 'Calls are <|open|>call tool="weather" index="1"<|sep|> and <|close|>call<|sep|> in one.'),
    ("kimi_k3", 'It begins with <|open|>tools<|sep|>, then <|open|>call tool="weather"'),
    ("minimax_m3", 'Use ]<]minimax[>[<invoke name="weather"> and ]<]minimax[>[<city> in it.'),
    ("hermes", "Write <tool_call> and then JSON."),
]


@pytest.mark.parametrize(("tools", "text"), PROSE)
def test_prose_about_calls_makes_none(tools, text):
    for size in range(1, len(text) + 1):
        events = parse(text, size, tools=tools)
        assert (content_of(events), calls_of(events)) == (text, [])


HELD = [
    ("qwen3_coder", "function f() {}\n</function>\n<b>", "</function> inside a text"),
    ("qwen3_coder", "</parameters>\n<parameter", "tags that are nearly ours"),
    ("minimax_m2", "</invoke> is a tag\n</parameter/> too", "tags in words"),
    ("glm45", "<arg_key>other</arg_key> </tool_call> x", "a key that is none"),
    ("deepseek_v3.2", "a</｜DSML｜invoke>b", "a tag without what follows it"),
    ("kimi_k3", "<|close|>call<|sep|> b<|close|>", "tags in words"),
    ("minimax_m3", "</city> ]<] </invoke> ]<]minimax[>[<b>", "tags without their token, or that none knows"),
]


@pytest.mark.parametrize(("tools", "value", "what"), HELD)
def test_a_value_may_hold_text_that_is_like_an_end(tools, value, what):
    text = render_calls(tools, [("weather", {"city": value, "days": 3})])
    for size in range(1, len(text) + 1):
        assert calls_of(parse(text, size, tools=tools)) == [("weather", {"city": value, "days": 3})], what


def test_the_sections_of_deepseek_v4_are_read_by_both_names():
    for tools in ("deepseek_v3.2", "deepseek_v4"):
        for written in ("deepseek_v3.2", "deepseek_v4"):
            text = "Looking." + render_calls(written, [("weather", {"city": "2>&1"})])
            events = parse(text, 3, tools=tools)
            assert (content_of(events), calls_of(events)) == ("Looking.", [("weather", {"city": "2>&1"})])
