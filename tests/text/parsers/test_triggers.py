"""A guide that free answers are held to has the layout that the model is taught, or it would be led astray."""

from __future__ import annotations

import functools

import pytest

from bireme.config import GuidedDecodingConfig, Limits
from bireme.guides import parse_guide
from bireme.logits.guided.compile_process import Compiler
from bireme.text.parsers import TOOLS
from tests.text.parsers.answers import render_calls

pytest.importorskip("xgrammar")
TRIGGERED = [name for name, form in TOOLS.items() if form.trigger]
PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}}
TREE = {"type": "array", "items": {"type": "string"}}
PARAMETERS = {"type": "object", "properties": {"place": PLACE, "days": {"type": "number"}, "flags": TREE}}
FUNCTIONS = ({"name": "weather", "parameters": PARAMETERS}, {"name": "now"})
CALLS = [
    [("weather", {"place": {"city": 'S\u00e3o Paulo "x"', "zip": 7}, "days": 2.5, "flags": ["a", "b"]})],
    [("weather", {"days": 1}), ("weather", {"flags": []})],
    [("now", {})],
    [("weather", {}), ("now", {})],
]


@functools.cache
def matcher(name):
    import xgrammar

    info = xgrammar.TokenizerInfo([bytes([at]) for at in range(256)], stop_token_ids=[0])
    guide = parse_guide(TOOLS[name].guide(FUNCTIONS, True), Limits())
    layout = GuidedDecodingConfig().any_whitespace
    request = {"info": info.serialize_json(), "view": "marked", "kind": guide.kind, "text": guide.text}
    answer = Compiler().answer(request | {"any_whitespace": layout})
    assert answer[:1] == b"+", answer
    return xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(answer[1:].decode(), info))


@pytest.mark.parametrize("name", TRIGGERED)
@pytest.mark.parametrize("calls", CALLS, ids=["one", "two", "no arguments", "neither has any"])
def test_what_a_template_writes_is_what_the_guide_allows(name, calls):
    text, trigger = render_calls(name, calls), TOOLS[name].trigger
    if name == "phi4":  # two ways are taught
        text = text.replace("functools", trigger) + "<|/tool_call|>"
    rest, found = text[text.index(trigger) :], matcher(name)
    while rest:  # of several calls, each with marks of its own, each is a guide's whole
        found.reset()
        for at, byte in enumerate(rest.encode(), 1):
            assert found.accept_token(byte), (rest.encode()[: at - 1], rest.encode()[at - 1 :])
            if found.is_completed():
                break
        assert found.is_completed()
        rest = rest.encode()[at:].decode().lstrip()


def test_marks_that_no_guide_begins_with_are_told():
    without = {"llama3_json", "llama4_json", "jamba", "command_a", "pythonic", "lfm2", "gemma3", "gemma4"}
    assert TOOLS.keys() - set(TRIGGERED) == without | {"functiongemma", "hunyuan3", "kimi_k3", "harmony"}
