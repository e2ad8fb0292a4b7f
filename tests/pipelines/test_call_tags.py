"""Which requests with tools get a guide that waits for a call's mark, and what is said where none can be made."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Inner

from bireme.config import Limits, Recipe
from bireme.conversion import convert
from bireme.errors import ConfigError, RequestError
from bireme.guides import parse_guide
from bireme.pipelines.call_tags import CallTags
from bireme.pipelines.chat_request import parse_chat
from bireme.text.parsers import tool_format
from bireme.text.tokenizer import TextTokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tokenizer(*marks):
    inner = Inner(models.WordLevel({"?": 0, "<TOOLCALL>": 1}, unk_token="?"))
    inner.add_tokens([AddedToken(mark) for mark in marks])
    return TextTokenizer(inner)


def recipe(engine="torch", tool_parser="hermes", structural_tags=None, stages=("decode",), limits=None, **config):
    worker = {"engine": engine, "engine_config": {"cache_transceiver_config": {"backend": "DEFAULT"}, **config}}
    chat = {"tool_parser": tool_parser, "structural_tags": structural_tags}
    fields = {"model": "none", "name": "test", "chat": chat, "workers": dict.fromkeys(stages, worker)}
    return convert(fields | {"limits": limits or {}}, Recipe, "test")


def asked(made, functions=({"name": "f", "parameters": SCHEMA},), marks=("<tool_call>",), **fields):
    """Return the guide of a request with these functions."""
    tags = CallTags(made, tool_format(made.chat.tool_parser), tokenizer(*marks))
    tools = [{"type": "function", "function": one} for one in functions]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    return tags.guide(parse_chat(json.dumps(body), made))


def test_a_request_that_may_call_gets_the_guide_that_the_mark_s_token_begins():
    guide = asked(recipe())
    assert guide["trigger"] == {"token": 2, "stop_after_first": False, "is_loose": True}
    assert parse_guide(guide, Limits()).text == json.dumps(
        tool_format("hermes").guide([{"name": "f", "parameters": SCHEMA}], True)["structural_tag"]
    )
    assert asked(recipe(), parallel_tool_calls=False)["trigger"]["stop_after_first"] is True


@pytest.mark.parametrize(
    ("fields", "marks", "words"),
    [
        ({"engine": "mocker"}, ("<tool_call>",), "engine mocker follows no guide"),
        ({"engine": "trtllm", "guided_decoding_backend": "xgrammar"}, ("<tool_call>",), "engine trtllm follows no"),
        ({"guided_decoding_backend": None}, ("<tool_call>",), "guided_decoding_backend of decode is null"),
        ({"tool_parser": "pythonic"}, ("<tool_call>",), "format pythonic has no mark"),
        ({}, ("<tool", "_call>"), "<tool_call> is not one token"),
        ({"tool_parser": "nemotron"}, (), "<TOOLCALL> is not one token"),  # a word of the vocabulary is none, either
    ],
)
def test_where_calls_can_t_be_held_to_their_schemas_the_log_says_why_or_the_recipe_is_refused(
    fields, marks, words, caplog
):
    with caplog.at_level("INFO", "bireme"):
        assert asked(recipe(**fields), marks=marks) is None
    assert words in caplog.text
    with pytest.raises(ConfigError, match=f"chat.structural_tags: true, but .*{words}"):
        asked(recipe(**fields, structural_tags=True), marks=marks)


def test_a_recipe_can_leave_calls_alone_and_so_do_answers_without_an_end():
    assert asked(recipe(structural_tags=False)) is None
    assert asked(recipe(), ignore_eos=True) is None


def test_tools_beyond_the_limits_of_guides_leave_an_answer_free_unless_one_is_strict(caplog):
    small = recipe(limits={"max_guide_bytes": 1024})
    large = {"name": "f", "description": "d", "parameters": {"type": "object", "title": "x" * 2000}}
    assert asked(small, (large,)) is None
    assert "guide_left_out" in caplog.text and "limits.max_guide_bytes is 1024" in caplog.text
    with pytest.raises(RequestError, match="tools.structural_tag: .* limits.max_guide_bytes is 1024"):
        asked(small, ({**large, "strict": True},))


def test_tools_beyond_the_limits_of_guides_are_not_kept():
    made = recipe(limits={"max_guide_bytes": 1024})
    tags = CallTags(made, tool_format("hermes"), tokenizer("<tool_call>"))
    for description, num_kept in (("d" * 4000, 0), ("d", 1)):
        function = {"name": "f", "description": description, "parameters": SCHEMA}
        tools = [{"type": "function", "function": function}]
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "tools": tools})
        assert tags.guide(parse_chat(body, made)) is not None and tags._made.cache_info().currsize == num_kept
