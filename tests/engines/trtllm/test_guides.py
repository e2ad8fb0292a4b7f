"""Guides as TensorRT-LLM takes them: one field each, and JSON in one layout."""

from __future__ import annotations

import json
import re

import pytest

from bireme.engines.trtllm.guides import TrtllmGuides, choice_regex
from bireme.errors import RequestError
from bireme.logits.guided.schema import rewritten

FREE = TrtllmGuides("xgrammar", any_whitespace=True)  # of JSON
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}, "s": {"type": "string", "maxLength": 3}}}


@pytest.fixture(scope="module")
def guides():
    pytest.importorskip("xgrammar")
    return TrtllmGuides("xgrammar", any_whitespace=False)


def accepts(grammar, text):
    import xgrammar

    info = xgrammar.TokenizerInfo([bytes([at]) for at in range(256)], stop_token_ids=[0])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(grammar))
    return matcher.accept_string(text) and matcher.accept_token(0)


@pytest.mark.parametrize(
    "guide, given",
    [
        ({"json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"choice": ["a.b", "c|d", "e-f g"]}, {"regex": r"(a\.b|c\|d|e-f g)"}),
    ],
)
def test_each_guide_becomes_exactly_one_field(guide, given):
    assert FREE.fields(guide) == given


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_a_schema_becomes_a_grammar_of_one_layout(guides, schema):
    ((kind, grammar),) = guides.fields({"json": schema}).items()
    assert kind == "grammar" and accepts(grammar, '{"n": 2, "s": "ab"}')
    assert not accepts(grammar, '{"n":  2}') and not accepts(grammar, '{"n": 3}')


def test_strings_of_limited_length_have_no_control_characters(guides):
    grammar = guides.fields({"json": SCHEMA})["grammar"]
    assert accepts(grammar, '{"s": "a b"}') and not accepts(grammar, '{"s": "a\tb"}')


def test_any_object_is_an_object(guides):
    grammar = guides.fields({"json_object": True})["grammar"]
    assert accepts(grammar, '{"a": [1, {}]}') and not accepts(grammar, "[1]")


@pytest.mark.parametrize(
    "schema, words",
    [({"type": "strange"}, "strange"), ({"uniqueItems": True}, "uniqueItems"), ({"required": [1]}, "required")],
)
def test_a_schema_that_can_not_be_enforced_is_refused_with_its_keyword(guides, schema, words):
    with pytest.raises(RequestError, match=rf"guided_decoding\.json: .*{words}"):
        guides.fields({"json": schema})


def test_a_grammar_that_xgrammar_does_not_read_back_is_left_to_tensorrt_llm(guides, monkeypatch):
    monkeypatch.setattr("xgrammar.Grammar.__str__", lambda self: "root ::= (")
    assert guides.fields({"json": SCHEMA}) == {"json": rewritten(SCHEMA)[0]}


def test_a_tool_s_schema_is_loosened_before_tensorrt_llm_sees_it(guides):
    content = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}, "is_loose": True}
    assert guides.fields({"structural_tag": {"format": content}})["structural_tag"]["format"] == {
        "type": "json_schema",
        "json_schema": {"type": "array"},
    }


def test_llguidance_gets_the_schema_itself():
    assert TrtllmGuides("llguidance", any_whitespace=False).fields({"json": SCHEMA}) == {"json": SCHEMA}


REASONED = [
    ({"json": {"enum": [7]}}, "7"),
    ({"json_object": True}, "{}"),
    ({"regex": "[0-9]{3}"}, "123"),
    ({"grammar": 'root ::= "yes" | "no"'}, "no"),
    ({"choice": ["a.b", "c|d"]}, "c|d"),
]


@pytest.mark.parametrize("guide, answer", REASONED, ids=[next(iter(guide)) for guide, _ in REASONED])
def test_what_comes_before_the_end_of_reasoning_is_free(guides, guide, answer):
    grammar = guides.fields({**guide, "reasoning_end": "</think>"})["grammar"]
    for thought in ("</think>", '1 < 2\n"\u20ac\U0001f600"</think>\n\n', "<</thin</think> "):
        assert accepts(grammar, thought + answer)
    assert not accepts(grammar, answer) and not accepts(grammar, f"a</think>b</think>{answer}")


def test_an_end_of_reasoning_that_repeats_itself_is_found_where_it_first_ends(guides):
    end = "aab\U0001f600aaab"
    grammar = guides.fields({"choice": ["x"], "reasoning_end": end})["grammar"]
    assert accepts(grammar, "aa" + end + "x") and accepts(grammar, "aab\U0001f600aa" + end + "x")
    assert not accepts(grammar, end[1:] + "x")


@pytest.mark.parametrize("backend, guide", [("xgrammar", {"structural_tag": "{}"}), ("llguidance", {"regex": "a"})])
def test_where_reasoning_can_not_be_left_free_it_is_refused_with_the_way_out(backend, guide):
    with pytest.raises(RequestError, match="use a structural_tag that has it as a part"):
        TrtllmGuides(backend, any_whitespace=False).fields({**guide, "reasoning_end": "</think>"})


def test_a_choice_matches_itself_and_nothing_else():
    choices = ["C++ (17)", "[x]{2}", "a*b", "1/2", "$^"]
    pattern = re.compile(choice_regex(choices))
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert not pattern.fullmatch("aab")
