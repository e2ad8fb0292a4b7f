"""Reasoning and tool calls told apart, however the text was cut."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bireme.errors import ConfigError, RequestError
from bireme.text.parsers import REASONING, TOOLS, create_parser, reasoning_format, tool_format
from bireme.text.parsers.base import CallArguments, CallStart, Content, Event, ParserRequest, Reasoning
from tests.text.parsers.answers import render_calls

FUNCTIONS: tuple[dict[str, Any], ...] = (
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": ["string", "null"]},
                "flags": {"type": "array", "items": {"type": "boolean"}},
                "free": {},
            },
            "required": ["city"],
        },
    },
    {"name": "now"},
)
WEATHER = {"city": 'New "York"\n', "days": 3, "flags": [True, False]}
ARGUMENTS = json.dumps(WEATHER)


def make(tools="", reasoning="", prompt_end=""):
    request = ParserRequest(FUNCTIONS if tools else (), prompt_end)
    return create_parser(reasoning_format(reasoning), tool_format(tools), request)


def parse(text, size=1 << 30, is_cut=False, **formats):
    parser = make(**formats)
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    return joined(events + parser.close(is_cut))


def joined(events):
    """Join the texts of neighbors."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, (Content, Reasoning)) and type(event) is type(last):
            result[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            result[-1] = CallArguments(last.index, last.text + event.text)
        else:
            result.append(event)
    return result


def calls_of(events):
    return [(name, json.loads(arguments, parse_constant=pytest.fail)) for name, arguments in arguments_of(events)]


def arguments_of(events):
    """Return each call's name and the text of its arguments."""
    texts = {event.index: "" for event in events if isinstance(event, CallStart)}
    for event in events:
        if isinstance(event, CallArguments):
            texts[event.index] += event.text
    names = [event.name for event in events if isinstance(event, CallStart)]
    return [(name, texts[index]) for index, name in enumerate(names)]


def content_of(events):
    return "".join(event.text for event in events if isinstance(event, Content))


def is_utf8(events):
    """Whether all that goes to a client can be encoded."""
    texts = [event.name if isinstance(event, CallStart) else event.text for event in events]
    return not any(0xD800 <= ord(letter) <= 0xDFFF for text in texts for letter in text)


ONE = [("weather", WEATHER)]
TWO = [("weather", WEATHER), ("now", {})]
CODER = """<tool_call>
<function=weather>
<parameter=city>
New "York"

</parameter>
<parameter=days>
3
</parameter>
<parameter=flags>
[true, false]
</parameter>
</function>
</tool_call>"""
DEEPSEEK = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
# format, text, content, calls
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>', "", ONE),
    (
        "hermes",
        f'Let me look.\n<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "Let me look.",
        TWO,
    ),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call> done', "done", ONE),
    ("hermes", f'<tool_call>{{"id": 1, "name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>', "", ONE),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}, "id": "x"}}</tool_call>', "", ONE),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}', "", ONE),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("hermes", "x < y <tool <tool_call", "x < y <tool <tool_call", []),
    ("hermes", 'a <tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
    ("hermes", "a  <tool_call>no json</tool_call> b ", None, []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, 2,], }}</tool_call>', "", [("now", {"a": [1, 2]})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x\ny\t"}}</tool_call>', "", [("now", {"a": "x\ny\t"})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1, "b": oops}}', ', "b": oops}}', [("now", {"a": 1})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "now"}</tool_call>', None, []),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\": NaN}", "name": "now"}</tool_call>', None, []),
    ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", ONE),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}', "", ONE),
    (
        "llama3_json",
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
        "",
        TWO,
    ),
    ("llama3_json", '{"colour": "red"} is JSON', '{"colour": "red"} is JSON', []),
    ("llama3_json", 'see {"name": "now", "parameters": {}}', 'see {"name": "now", "parameters": {}}', []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]', "", ONE),
    (
        "mistral",
        f'Yes. [TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
        "Yes.",
        TWO,
    ),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]now{{}}", "", TWO),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc123456[ARGS]{ARGUMENTS}", "", ONE),
    ("mistral", "[TOOL_CALLS]nothing{}", "[TOOL_CALLS]nothing{}", []),
    ("pythonic", "[weather(city='New \"York\"\\n', days=3, flags=[True, False]), now()]", "", TWO),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", {})]),
    ("pythonic", '[weather(city="]) (", days=-1)]', "", [("weather", {"city": "]) (", "days": -1})]),
    ("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    ("pythonic", "[now(__import__('os').system('id'))]", "[now(__import__('os').system('id'))]", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "[now(a=1", "[now(a=1", []),
    ("qwen3_coder", CODER, "", ONE),
    ("qwen3_coder", f"Well.\n{CODER}\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "Well.", TWO),
    (
        "qwen3_coder",
        "<function=weather><parameter=city>7</parameter><parameter=units>null</parameter></function>",
        "",
        [("weather", {"city": "7", "units": None})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>a <b> </p></parameter><parameter=days>many</parameter>"
        '<parameter=free>{"x": 1}</parameter></function></tool_call>',
        "",
        [("weather", {"city": "a <b> </p>", "days": "many", "free": '{"x": 1}'})],
    ),
    (
        "qwen3_coder",
        "<function=weather><parameter=city>a</parameter><parameter=flags>[1e999]</parameter></function>",
        "",
        [("weather", {"city": "a", "flags": "[1e999]"})],
    ),
    ("qwen3_coder", "<tool_call>\n<function=other>\n</function>", None, []),
    ("deepseek_v3.1", f"<｜tool▁calls▁begin｜>{DEEPSEEK}<｜tool▁calls▁end｜>", "", ONE),
    (
        "deepseek_v3.1",
        f"Hm.<｜tool▁calls▁begin｜>{DEEPSEEK}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        TWO,
    ),
    ("deepseek_v3.1", "a <｜tool▁call▁begin｜>now<｜tool▁sep｜> none", None, []),
    ("deepseek_v3.1", "<｜tool▁calls▁begin｜>none", "<｜tool▁calls▁begin｜>none", []),
    (
        "harmony",
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary to=functions.weather"
        f" <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "",
        ONE,
    ),
    ("harmony", f"<|channel|>commentary to=functions.weather<|message|>{ARGUMENTS}", "", ONE),
    ("harmony", "<|channel|>commentary to=functions.now<|message|>none", None, []),
    ("harmony", "<|channel|>final<|message|>The answer is 4.<|return|>", "The answer is 4.", []),
    (
        "harmony",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "",
        [("now", {})],
    ),
    ("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", "", ONE),
    ("harmony", f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}", "", ONE),
    ("harmony", f"assistant<|channel|>commentary to=functions.weather json<|message|>{ARGUMENTS}<|call|>", "", ONE),
    (
        "harmony",
        "<|channel|>analysis<|message|>t<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{}",
        "",
        [("now", {})],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>t<|end|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>"
        "assistant<|channel|>final<|message|>assistant to=you",
        "assistant to=you",
        [("now", {})],
    ),
    ("harmony", "<|channel|>analysis<|message|>t<|channel|>commentary to=now<|message|>{}", "", [("now", {})]),
    ("harmony", "<|channel|>final<|message|>write <|channel|> so", "write <|channel|> so", []),
    ("harmony", "assistant to you, to=me", None, []),
    ("harmony", " to=functions.now", None, []),
]
IDS = [f"{case[0]}-{at}" for at, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_calls_and_content_are_told_apart(case):
    tools, text, content, calls = case
    events = parse(text, tools=tools)
    assert calls_of(events) == calls
    assert content_of(events) == (text if content is None else content)


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_cut_into_pieces_changes_nothing(case, is_cut):
    tools, text = case[0], case[1]
    for end in (len(text), len(text) // 2, len(text) * 4 // 5):
        whole = parse(text[:end], is_cut=is_cut, tools=tools)
        for size in range(1, end + 1):
            assert parse(text[:end], size, is_cut, tools=tools) == whole, size


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_call_that_breaks_off_is_valid_json_unless_the_answer_was_cut(case):
    tools, text = case[0], case[1]
    for end in range(len(text)):
        finished, cut = parse(text[:end], tools=tools), parse(text[:end], is_cut=True, tools=tools)
        calls = calls_of(finished)
        assert all(isinstance(arguments, dict) for _, arguments in calls), end
        # The cut answer has the same calls, and all that came of them.
        assert [name for name, _ in arguments_of(cut)] == [name for name, _ in calls], end
        for (_, whole), (_, part) in zip(arguments_of(finished), arguments_of(cut), strict=True):
            assert part.startswith(whole.rstrip('{"]}')), end


def test_arguments_stream_as_they_come():
    parser = make("hermes")
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa'
    assert joined(parser.feed(text)) == [CallStart(0, "weather"), CallArguments(0, '{"city": "Pa')]
    assert parser.feed("ris") == [CallArguments(0, "ris")]
    assert parser.feed('", "da') == [CallArguments(0, '"')]
    assert joined(parser.feed('ys": 3}}')) == [CallArguments(0, ', "days": 3}')]


def test_content_streams_as_it_comes():
    parser = make("hermes")
    assert parser.feed("one ") == [Content("one")]
    assert parser.feed("two <") == [Content(" two")]
    assert parser.feed("b>") == [Content(" <b>")]


def test_an_answer_that_was_cut_keeps_what_came():
    events = parse('<tool_call>{"name": "weather", "arguments": {"city": "Par', is_cut=True, tools="hermes")
    assert events == [CallStart(0, "weather"), CallArguments(0, '{"city": "Par')]


def test_without_functions_call_syntax_is_content():
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert parse(text) == [Content(text)]


THOUGHTS = [
    ("think", "", "<think>\nhm\n\nso\n</think>\n\nyes", [Reasoning("hm\n\nso"), Content("yes")]),
    ("think", "<think>\n", "hm\n</think>\nyes", [Reasoning("hm"), Content("yes")]),
    ("think", "", "yes", [Content("yes")]),
    ("think", "", " <thin yes ", [Content(" <thin yes ")]),
    ("think", "", "<think>hm", [Reasoning("hm")]),
    ("think", "<think>", "hm </th", [Reasoning("hm </th")]),
    ("think", "<think>\n\n</think>\n\n", "yes </think> no", [Content("yes </think> no")]),
    ("deepseek_r1", "", "hm</think>yes", [Reasoning("hm"), Content("yes")]),
    ("deepseek_r1", "", "<think>hm</think>yes", [Reasoning("hm"), Content("yes")]),
    ("qwen3", "<think>\n\n</think>\n\n", "yes", [Content("yes")]),
    (
        "harmony",
        "",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
        [Reasoning("hm"), Content("yes")],
    ),
    (
        "harmony",
        "",
        "<|channel|>analysis<|message|>hm <|start|> so<|end|>assistant<|channel|>final<|message|>yes",
        [Reasoning("hm <|start|> so"), Content("yes")],
    ),
    ("harmony", "", "<|channel|>analysis<|message|>hm <|channel|>", [Reasoning("hm <|channel|>")]),
]


@pytest.mark.parametrize(("name", "prompt_end", "text", "expected"), THOUGHTS)
def test_reasoning_is_told_from_the_answer(name, prompt_end, text, expected):
    for size in range(1, len(text) + 1):
        assert parse(text, size, reasoning=name, prompt_end=prompt_end) == expected


def test_reasoning_comes_before_calls():
    text = '<think>hm</think>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for size in range(1, len(text) + 1):
        events = parse(text, size, reasoning="think", tools="hermes")
        assert events == [Reasoning("hm"), CallStart(0, "now"), CallArguments(0, "{}")]


def test_a_parser_says_when_it_reads_reasoning():
    parser = make(reasoning="think", prompt_end="<think>\n")
    assert parser.is_reasoning
    parser.feed("hm </think> yes")
    assert not parser.is_reasoning


def test_a_guide_spares_reasoning_where_the_answer_begins_with_it():
    guide = {"regex": "a"}
    cases = [("think", "", None), ("think", "<think>\n", "</think>"), ("qwen3", "", "</think>")]
    cases += [("qwen3", "<think>\n\n</think>\n\n", None), ("deepseek_r1", "", "</think>")]
    cases += [("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>")]
    for name, prompt_end, end in cases:
        exempt = REASONING[name].exempt(guide, ParserRequest((), prompt_end))
        assert exempt.get("reasoning_end") == end, (name, prompt_end)


def test_a_guide_that_waits_for_its_trigger_is_told_which_text_is_reasoning():
    guide = {"regex": "a", "trigger": {"token": 7}}
    cases = [("think", "", "</think>", "<think>"), ("think", "<think>\n", "</think>", None)]
    cases += [("qwen3", "<think>\n\n</think>\n\n", None, None), ("deepseek_r1", "", "</think>", None)]
    for name, prompt_end, end, begin in cases:
        exempt = REASONING[name].exempt(guide, ParserRequest((), prompt_end))
        assert (exempt.get("reasoning_end"), exempt["trigger"].get("reasoning_begin")) == (end, begin)
        assert exempt["trigger"]["token"] == 7


@pytest.mark.parametrize("name", ["pythonic", "gemma3", "lfm2", "hunyuan3"])
def test_calls_that_no_grammar_knows_can_t_be_enforced(name):
    with pytest.raises(RequestError, match="tool_choice"):
        TOOLS[name].guide(FUNCTIONS, True)


def test_an_unknown_format_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean hermes"):
        tool_format("hermess")


def test_the_example_of_the_docs_works():
    from pathlib import Path

    from bireme.text.parsers.scan import may_become
    from bireme.text.parsers.stateful import StatefulParser

    page = (Path(__file__).parents[3] / "docs" / "parsers.md").read_text()
    code = next(block for block in page.split("```python\n") if block.startswith("class BracketParser")).split("```")[0]
    scope: dict[str, Any] = {"StatefulParser": StatefulParser, "may_become": may_become}
    exec(code, scope)
    text = 'So: <<weather {"city": "x"}>> <<other {}>> done <<now {}'
    for size in range(1, len(text) + 1):
        parser = scope["BracketParser"](ParserRequest(FUNCTIONS))
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        events += parser.close()
        assert calls_of(events) == [("weather", {"city": "x"}), ("now", {})]
        assert content_of(events) == "So:<<other {}>> done"


# Adversarial text

PIECES = sorted(
    {
        *(
            "<TOOLCALL>",
            "</TOOLCALL>",
            "functools",
            "<|tool_call|>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        *(
            '<invoke name="',
            '<parameter name="',
            "</invoke>",
            ' string="true"',
            "<｜DSML｜function_calls>",
            "```tool_code",
            "```",
        ),
        *(
            "<|tool_call>",
            "<tool_call|>",
            '<|"|>',
            "call:",
            "<|tool_call_begin|>",
            "functions.now:0",
            "<|python_start|>",
        ),
        *("<|tool_call_argument_begin|>", "<|tool_calls_section_begin|>", "<|channel>", "<channel|>", "<response>"),
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<function=", "</function>"),
        *("<parameter=", "</parameter>", ">", "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ";", ":", " ", "\n"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "analysis", "commentary", "final"),
        *(
            "to=functions.now",
            "now",
            "weather",
            '{"name": "now", "arguments": {',
            '"parameters"',
            "1",
            "-",
            "1e5",
            "tru",
        ),
        *("true", "\\u12", "\\ud800", "\\ude00", "ünï", "😀", "<|python_tag|>", "[now(", "a=", "x", "\x00", "\u2028"),
    }
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)
FORMATS = st.sampled_from(
    [
        *((name, "") for name in TOOLS),
        *(("hermes", name) for name in REASONING if name != "harmony"),
        ("harmony", "harmony"),
    ]
)


BLANKS = (" ", "\n", "\t", "\r\n", "\x0b", "\x1c", "\x85", "\xa0", "\u2028", "\n" * 63, " " * 64, "\t" * 65)
LONG = ("x" * 100, "a" * 500, "9" * 520, '"' + "k" * 520)
INSERTS = st.sampled_from([*PIECES, *BLANKS, *LONG]) | st.text(max_size=3)


SAMPLES = [*(case[:2] for case in CASES), *((name, render_calls(name, TWO)) for name in TOOLS)]


@st.composite
def damaged(draw):
    """A format's own text, with parts put in, taken out and repeated; and the format."""
    tools, text = draw(st.sampled_from(SAMPLES))
    for _ in range(draw(st.integers(0, 4))):
        first, last = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        middle = draw(st.sampled_from(("", text[first:last] * 2)) | INSERTS)
        text = text[:first] + middle + text[draw(st.sampled_from((first, last))) :]
    return text, (tools, draw(st.sampled_from(("", "think", "kimi_k2"))) if tools != "harmony" else "harmony")


@settings(max_examples=700, deadline=None)
@given(st.tuples(TEXTS, FORMATS) | damaged(), st.lists(st.integers(1, 20), min_size=1, max_size=9), st.booleans())
@example(('\u2028{"name": "now", "arguments": {', ("llama3_json", "")), [2], False)
@example(('<tool_call>{"name": "now",\xa0"arguments": {}}', ("hermes", "")), [2], False)
@example(("[" + " " * 65 + "now()]", ("pythonic", "")), [2], False)
@example(('[now(a="\\ud83d\\ude00")]', ("pythonic", "")), [2], False)
@example(('[TOOL_CALLS]{"name": ' + "a" * 600, ("mistral", "")), [2], False)
def test_any_text_gives_the_same_events_in_any_pieces(case, sizes, is_cut):
    text, (tools, reasoning) = case
    whole = parse(text, is_cut=is_cut, tools=tools, reasoning=reasoning)
    assert parse(text, 1, is_cut, tools=tools, reasoning=reasoning) == whole
    parser, at, events = make(tools, reasoning), 0, []
    for size in itertools.cycle(sizes):  # a draw a piece would take as long as the parser
        if at >= len(text):
            break
        events += parser.feed(text[at : at + size])
        at += size
    events += parser.close(is_cut)
    assert joined(events) == whole and is_utf8(events)
    if not is_cut:
        calls_of(whole)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="<[{;"), max_size=200), FORMATS)
def test_plain_text_comes_out_whole(text, formats):
    tools, reasoning = formats
    events = parse(text, 1, tools=tools, reasoning=reasoning if reasoning != "deepseek_r1" else "think")
    assert content_of(events) == text


@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize(
    "unit", ["<", " ", "<tool_call>", '<tool_call>{"name": "now", "arguments": {"a": "', "[", "{", '{"a":']
)
def test_time_grows_with_the_text_and_not_with_its_square(tools, unit):
    def seconds(num_characters):
        parser, began = make(tools), time.process_time()
        for at in range(0, num_characters, 4):
            parser.feed((unit * 4)[at % len(unit) : at % len(unit) + 4])
        parser.close()
        return time.process_time() - began

    assert seconds(24_000) < 40 * max(seconds(3_000), 0.003)  # linear: 8; quadratic: 64
