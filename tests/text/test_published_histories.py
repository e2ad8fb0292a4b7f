"""Histories in 70 published chat templates, against what transformers makes of the same template.

A history is shown as transformers shows it wherever that loses nothing. What a template would drop is put in by a rule
(CallForm, the module chat_template), and a template that refuses a history does so with its own words.
"""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest

from bireme.errors import RequestError
from bireme.text.chat_template import ChatTemplate
from tools import real_model

pytestmark = pytest.mark.soak  # pip takes half a minute for the templates, the first time
NUM_TEMPLATES = 70
OUTCOMES = {"equal": 596, "put in": 63, "refused by both": 41}
NAME = "get_weather"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "w",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "c"}},
                "required": ["city"],
            },
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *cities, **more):
    calls = [
        {"id": f"abcdefgh{n}", "type": "function", "function": {"name": NAME, "arguments": json.dumps({"city": city})}}
        for n, city in enumerate(cities, 1)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **more}


def result(text, number=1):
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": NAME, "content": text}


HISTORIES = {
    "one question": ([user("hi1")], None),
    "a system prompt": ([{"role": "system", "content": "S1"}, user("hi1")], None),
    "turns": ([user("a1"), assistant("b1"), user("c1")], None),
    "tools": ([user("hi1")], TOOLS),
    "a call": ([user("q1"), assistant("", "Oslo"), result("rain1")], TOOLS),
    "a call and text": ([user("q1"), assistant("Look1", "Oslo"), result("rain1")], TOOLS),
    "a call, then on": ([user("q1"), assistant("", "Oslo"), result("rain1"), assistant("It1"), user("t1")], TOOLS),
    "two calls": ([user("q1"), assistant("", "Oslo", "Bergen"), result("rain1"), result("sun1", 2)], TOOLS),
    "thoughts": ([user("q1"), assistant("x1", reasoning_content="hm1"), user("t1")], None),
    "a call without tools": ([user("q1"), assistant("", "Oslo"), result("rain1")], None),
}


@pytest.fixture(scope="module")
def templates():
    try:
        folder = real_model.chat_templates()
    except real_model.NotFetchedError as error:
        pytest.skip(str(error))
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


@pytest.fixture(scope="module")
def outcomes(templates):
    """What became of each history in each template."""
    found = {}
    for template, source in templates.items():
        made = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
        for history, (messages, tools) in HISTORIES.items():
            found[template, history] = outcome(own(made, messages, tools), theirs(source, messages, tools), messages)
    return found


def own(template, messages, tools):
    try:
        return template.render(messages, tools).text
    except RequestError:
        return None


def theirs(source, messages, tools):
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = copy.deepcopy(messages)
    for message in conversation:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        rendered, _ = render_jinja_template(
            [conversation], tools=tools, chat_template=source, add_generation_prompt=True, documents=None, **tokens
        )
        return rendered[0]
    except Exception:  # a template's own, or what Jinja makes of a message that it did not expect
        return None


def outcome(shown, reference, messages):
    if shown is None:
        return "refused by both" if reference is None else "refused by us alone"
    if lost(shown, messages):
        return f"lost {lost(shown, messages)}"
    if shown == reference:
        return "equal"
    return "put in" if reference is None or lost(reference, messages) else "differs"


def lost(shown, messages):
    texts = [message["content"] for message in messages]
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    return [text for text in [*texts, *(json.loads(call)["city"] for call in calls)] if text not in shown]


@pytest.mark.parametrize("history", HISTORIES)
def test_nothing_of_a_history_is_lost_and_what_transformers_shows_whole_is_shown_alike(outcomes, history):
    found = {template: each for (template, told), each in outcomes.items() if told == history}
    assert len(found) == NUM_TEMPLATES
    assert {template: each for template, each in found.items() if each not in OUTCOMES} == {}


def test_as_many_histories_are_equal_put_in_and_refused_as_were_looked_at(outcomes):
    assert Counter(outcomes.values()) == OUTCOMES
