"""What a model's template renders is read back, wherever it was cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.text.parsers import REASONING, TOOLS
from bireme.text.parsers.base import CallArguments, CallStart, Content, Reasoning
from tests.text.parsers import answers
from tests.text.parsers.test_parsers import WEATHER, calls_of, content_of, is_utf8, make, parse

ONE_CALL = ("llama4_json", "harmony")  # what they write has no second call
CALLS = [("weather", {**WEATHER, "units": None}), ("now", {}), ("weather", {"city": ""})]
TEXTS = st.text(st.sampled_from("aé😀 \n\t\"'\\{}[](),:;<>/=`|") | st.characters(codec="utf-8"), max_size=12)
# White space at an end is layout, and no format can write its own end of a value within one.
VALUE_ENDS = ("</arg_value>", "</parameter>", "<escape>", '<|"|>')
WORDS = TEXTS.map(str.strip).filter(lambda text: not any(end in text for end in VALUE_ENDS))
ARGUMENTS = st.fixed_dictionaries(
    {"city": WORDS},
    optional={
        "days": st.integers(-(1 << 60), 1 << 60),
        "flags": st.lists(st.booleans(), max_size=3),
        "units": st.none(),
    },
)


@pytest.mark.parametrize("name", TOOLS)
def test_every_cut_of_a_rendered_answer_gives_its_calls(name):
    calls = CALLS[: 1 if name in ONE_CALL else 3]
    text, calls = answers.render_calls(name, calls), answers.read_back(name, calls)
    whole = parse(text, tools=name)
    assert calls_of(whole) == calls and content_of(whole) == ""
    assert parse(text, 1, tools=name) == whole
    for at in range(1, len(text)):
        parser = make(name)
        first = parser.feed(text[:at])
        assert calls_of([*first, *parser.feed(text[at:]), *parser.close()]) == calls, at


@pytest.mark.parametrize("name", TOOLS)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.just("weather"), ARGUMENTS), min_size=1, max_size=3), st.integers(1, 9))
def test_any_arguments_are_read_back(name, calls, size):
    calls = calls[: 1 if name in ONE_CALL else 3]
    events = parse(answers.render_calls(name, calls), size, tools=name)
    assert calls_of(events) == answers.read_back(name, calls) and content_of(events) == ""


ESCAPES = st.lists(st.sampled_from(["\\ud83d", "\\ude00", "\\\\", "\\n", "u", "é", "😀"]), max_size=6).map("".join)
ENVELOPES = [name for name in TOOLS if '"name": ' in answers.CALLS[name]]


@pytest.mark.parametrize("name", TOOLS)
@settings(max_examples=40, deadline=None)
@given(ESCAPES, st.integers(1, 9), st.booleans())
def test_whatever_escapes_a_model_writes_utf8_can_carry_its_calls(name, written, size, is_cut):
    text = answers.render_calls(name, [("weather", {"city": "@", "flags": ["@"], "@": "@"})]).replace("@", written)
    if is_cut:
        text = text[:-size]
    whole = parse(text, tools=name, is_cut=is_cut)
    assert is_utf8(whole) and parse(text, size, is_cut, tools=name) == whole
    if not is_cut:
        calls_of(whole)


@pytest.mark.parametrize("name", ["pythonic", "gemma3"])
def test_an_emoji_as_escapes_in_a_python_literal_is_read(name):
    text = answers.render_calls(name, [("weather", {"city": "hi @"})]).replace("@", r"\ud83d\ude00")
    for size in (1, 7, len(text)):
        events = parse(text, size, tools=name)
        assert is_utf8(events) and calls_of(events) == [("weather", {"city": "hi 😀"})]


@pytest.mark.parametrize("name", ENVELOPES)
@settings(max_examples=25, deadline=None)
@given(ESCAPES, st.integers(1, 9))
def test_utf8_can_carry_a_call_whose_name_comes_last(name, written, size):
    text = answers.render_calls(name, [("weather", {"city": "@"})]).replace("@", written)
    head = next(part for part in ('"name": "weather", ', '"type": "function", "name": "weather", ') if part in text)
    text = text.replace(head, "").replace(f'"{written}"}}', f'"{written}"}}, "name": "weather"', 1)
    events = parse(text, size, tools=name)
    assert is_utf8(events) and calls_of(events) == [("weather", {"city": json.loads(f'"{written}"')})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", r'<tool_call>{"arguments": {"flags": ["\ud83d", "é"]}, "name": "weather"}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "weather", "id": 1, "arguments": {"flags": ["\ud83d", "é"]}}</tool_call>'),
        ("qwen3_coder", r'<function=weather><parameter=flags>["\ud83d", "é"]</parameter></function>'),
        ("pythonic", r"[weather(flags=['\ud83d', 'é'])]"),
    ],
)
def test_half_a_character_stays_an_escape(name, text):
    events = parse(text, tools=name)
    assert is_utf8(events) and calls_of(events) == [("weather", {"flags": ["\ud83d", "é"]})]


def test_arguments_as_deep_as_python_goes_are_no_error():
    for depth in range(800, 1000):  # what can be read may be just too deep to be written
        arguments = json.dumps('{"a": ' + "[" * depth + "]" * depth + "}")
        text = f'<tool_call>{{"arguments": {arguments}, "name": "now"}}</tool_call>'
        events = parse(text, tools="hermes")
        assert events[0] == CallStart(0, "now") or content_of(events) == text, depth


@pytest.mark.parametrize("name", REASONING)
def test_every_cut_of_a_rendered_thought_gives_it_apart(name):
    text = answers.render_thought(name, "First 2 < 3.\n\nThen <so>.", "It is 5 <b>.")
    for at in range(len(text)):
        parser = make("", name, answers.REASONING[name][0])
        events = [*parser.feed(text[:at]), *parser.feed(text[at:]), *parser.close()]
        assert "".join(e.text for e in events if isinstance(e, Reasoning)) == "First 2 < 3.\n\nThen <so>.", at
        assert content_of(events) == "It is 5 <b>.", at


@pytest.mark.parametrize("name", sorted(set(TOOLS) - {"pythonic", "gemma3", "lfm2"}))
def test_arguments_stream_while_they_are_written(name):
    text = answers.render_calls(name, [("weather", {"city": "Paris and then Berlin"})])
    parser = make(name)
    events = parser.feed(text[: text.index("and")])
    assert [event for event in events if isinstance(event, CallStart)] == [CallStart(0, "weather")]
    assert "Paris" in "".join(event.text for event in events if isinstance(event, CallArguments))


@pytest.mark.parametrize("name", TOOLS)
def test_calls_of_functions_that_were_not_offered_are_content(name):
    text = answers.render_calls(name, [("other", {"a": "b"})])
    for size in (1, 7, len(text)):
        events = parse(text, size, tools=name)
        assert not calls_of(events)
        assert name == "harmony" or content_of(events).strip() == text.strip()


# Where the template writes no mark before a call, models may.
MARKS = {"llama3_json": "<|python_tag|>", "pythonic": "<|python_start|>"}
THINKING = sorted(set(REASONING) - {"harmony"})


def thoughts_of(events):
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def left_open(reasoning, text):
    """Return a thought without its end mark, and a text behind it."""
    return answers.render_thought(reasoning, "I need it.@", "").partition("@")[0] + "\n" + text


@pytest.mark.parametrize("tools", sorted(set(TOOLS) - {"harmony"}))
@pytest.mark.parametrize("reasoning", THINKING)
def test_a_call_ends_a_thought_that_was_left_open(reasoning, tools):
    calls = [("weather", {"city": "Oslo </think>"})]
    text = left_open(reasoning, MARKS.get(tools, "") + answers.render_calls(tools, calls).lstrip())
    for size in (1, 3, 40, len(text)):
        events = parse(text, size, tools=tools, reasoning=reasoning, prompt_end=answers.REASONING[reasoning][0])
        assert (thoughts_of(events), calls_of(events), content_of(events)) == ("I need it.", calls, ""), size


@pytest.mark.parametrize("tools", sorted(set(TOOLS) - {"harmony"}))
@pytest.mark.parametrize("reasoning", THINKING)
def test_a_mark_that_is_thought_about_stays_a_thought(reasoning, tools):
    mark = make(tools).begins[0]
    thought = f"Calls begin with {mark}, \n {mark}{mark} {{ or {answers.render_calls(tools, [('other', {'a': 1})])} so."
    text = answers.render_thought(reasoning, thought, "Yes.")
    for size in (1, 3, 40, len(text)):
        events = parse(text, size, tools=tools, reasoning=reasoning, prompt_end=answers.REASONING[reasoning][0])
        assert (thoughts_of(events), content_of(events), calls_of(events)) == (thought, "Yes.", []), size


@pytest.mark.parametrize("tools", sorted(set(TOOLS) - {"harmony"}))
@pytest.mark.parametrize("reasoning", THINKING)
def test_the_end_of_a_thought_behind_its_call_is_no_content(reasoning, tools):
    call = MARKS.get(tools, "") + answers.render_calls(tools, [("weather", {"city": "Oslo"})]).lstrip()
    text = left_open(reasoning, f"{call}\n{REASONING[reasoning].ends[0]}\n\nYes.")
    for size in (1, 3, 40, len(text)):
        events = parse(text, size, tools=tools, reasoning=reasoning, prompt_end=answers.REASONING[reasoning][0])
        assert (thoughts_of(events), content_of(events)) == ("I need it.", "Yes."), size
        assert calls_of(events) == [("weather", {"city": "Oslo"})]


K3_CALL = answers.render_calls("kimi_k3", [("now", {})])
ALONE = [
    ("command_a", "<|END_THINKING|>", "<|START_RESPONSE|>It is 5.<|END_RESPONSE|>", "It is 5."),
    ("command_a", "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>It is 5.<|END_RESPONSE|>", "It is 5."),
    ("command_a", "<|CHATBOT_TOKEN|>", "It is 5.", "It is 5."),
    ("kimi_k3", "<|open|>response<|sep|>", "It is 5.<|close|>response<|sep|><|close|>message<|sep|>", "It is 5."),
    ("kimi_k3", "<|open|>response<|sep|>", "It is 5.<|close|>message<|sep|>", "It is 5."),
    ("kimi_k3", "<|open|>think<|sep|>", "<|open|>response<|sep|>It is 5.", "It is 5."),
    ("minimax_m3", "]~b]ai\n", "</mm:think>It is 5.", "It is 5."),
    ("minimax_m3", "]~b]ai\n</mm:think>", "It is 5.", "It is 5."),
    ("think", "", "</think>It is 5.", "</think>It is 5."),
    ("granite", "", "<response>It is 5.</response>", "<response>It is 5.</response>"),
]


@pytest.mark.parametrize(("reasoning", "prompt_end", "text", "content"), ALONE)
def test_the_marks_of_an_answer_without_thoughts_are_no_content(reasoning, prompt_end, text, content):
    for size in range(1, len(text) + 1):
        events = parse(text, size, reasoning=reasoning, prompt_end=prompt_end)
        assert (thoughts_of(events), content_of(events)) == ("", content)


NOW = "<|open|>response<|sep|>Now.<|close|>response<|sep|>"


@pytest.mark.parametrize("start", ["Hm.<|close|>think<|sep|>", "Hm.", f"Hm.<|close|>think<|sep|>{NOW}"])
def test_calls_of_kimi_k3_follow_its_answer_or_its_thoughts(start):
    for size in range(1, len(start + K3_CALL)):
        events = parse(start + K3_CALL, size, tools="kimi_k3", reasoning="kimi_k3", prompt_end="<|open|>think<|sep|>")
        assert (thoughts_of(events), calls_of(events)) == ("Hm.", [("now", {})])
        assert content_of(events) == ("Now." if "Now" in start else "")


@pytest.mark.parametrize("end", ["", "</think>yes", '<tool_call>{"name": "now", "arguments": {}}'])
def test_a_mark_without_a_call_does_not_hold_thoughts_back_for_ever(end):
    thought = '<tool_call>{"a": "' + "b" * 5000
    events = parse(thought + end, tools="hermes", reasoning="think", prompt_end="<think>")
    assert (
        thoughts_of(events) == thought
        and parse(thought + end, 1, tools="hermes", reasoning="think", prompt_end="<think>") == events
    )
    assert content_of(events) == ("yes" if "yes" in end else "") and len(calls_of(events)) == ("now" in end)


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("phi4", '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>', [("now", {})], ""),
        ("phi4", "import functools\n@functools.cache", [], "import functools\n@functools.cache"),
        ("granite", 'So.\n<tool_call>[{"name": "now", "arguments": {}}]', [("now", {})], "So."),
        ("nemotron", '<TOOLCALL>[{"name": "now", "arguments": {}}</TOOLCALL> done', [("now", {})], "done"),
        ("nemotron", "<TOOLCALL>[]</TOOLCALL>", [], "<TOOLCALL>[]</TOOLCALL>"),
        ("pythonic", "<|python_start|>now()<|python_end|> yes", [("now", {})], "yes"),
        ("pythonic", "now()", [], "now()"),
        ("lfm2", "<|tool_call_start|>[weather(city='it's \na \"b\", (c', days=3), now()]<|tool_call_end|>so",
         [("weather", {"city": "it's \na \"b\", (c", "days": 3}), ("now", {})], "so"),
        ("lfm2", "<|tool_call_start|>[weather(city='it's', days=f())]<|tool_call_end|>", [], None),
        ("lfm2", "<|tool_call_start|>[other(city='it's')]<|tool_call_end|> so", [], None),
        ("lfm2", "<|tool_call_start|>[weather(city='it's", [], None),
        ("gemma3", "[now()]", [("now", {})], ""),
        ("gemma3", "```tool_code\nprint(1)\n```", [], "```tool_code\nprint(1)\n```"),
        ("gemma3", "```tool_code\nnow()\nor so", [("now", {})], "or so"),
        ("gemma4", '<|tool_call>call:weather{"city":"a","free":{b:[1,<|"|>"<|"|>]}}<tool_call|>', None, ""),
        ("gemma4", "<|tool_call>call:weather{city:<|\"|>Par", [("weather", {"city": "Par"})], ""),
        ("gemma4", "<|tool_call>call:now{a b}", [("now", {})], 'a b}'),
        ("gemma4", "<|tool_call>call:weather{units:None,flags:[True]}<tool_call|>",
         [("weather", {"units": None, "flags": [True]})], ""),
        ("glm45", "<tool_call>now</tool_call>ok", [("now", {})], "ok"),
        (
            "glm45",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key></tool_call>",
            [("weather", {"city": "Rome"})],
            "<arg_key>days</arg_key></tool_call>",
        ),
        ("minimax_m2", '<invoke name="now"></invoke></minimax:tool_call>', [("now", {})], ""),
        (
            "deepseek_v3.2",
            '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="free" string="false">7</｜DSML｜parameter>'
            '<｜DSML｜parameter name="city" string="true">7</｜DSML｜parameter></｜DSML｜invoke>',
            [("weather", {"free": 7, "city": "7"})],
            "",
        ),
        ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>", [("now", {})], ""),
        ("kimi_k2", "<|tool_call_begin|>functions.now:x<|tool_call_argument_begin|>{}", [], None),
        (
            "kimi_k3",
            '<|open|>call tool="weather" index="2"<|sep|><|open|>json type="object"<|sep|>{"city": "a\\nb"}'
            "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
            [("weather", {"city": "a\nb"})],
            "",
        ),
        (
            "kimi_k3",
            '<|open|>call tool="now"<|sep|><|open|>argument key="say &quot;a&amp;b&quot;" type="object"<|sep|>{"a": 1}'
            "<|close|>argument<|sep|><|close|>call<|sep|>",
            [],
            None,
        ),
        ("seed_oss", "<function=weather><parameter=flags>[True, False]</parameter></function>",
         [("weather", {"flags": [True, False]})], ""),
    ],
)  # fmt: skip
def test_what_models_write_beside_their_templates(name, text, calls, content):
    for size in range(1, len(text) + 1):
        events = parse(text, size, tools=name)
        assert calls is None or calls_of(events) == calls
        assert content_of(events) == (text if content is None else content)


def test_thoughts_of_granite_in_its_older_words():
    text = "Here is my thought process: 1 + 1 Here is my response: 2"
    for size in range(1, len(text)):
        assert parse(text, size, reasoning="granite") == [Reasoning("1 + 1"), Content("2")]
