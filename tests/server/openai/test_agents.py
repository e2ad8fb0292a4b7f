"""What agents and their frameworks send: names of thoughts, limits beside stop strings, schemas of others' tools."""

import functools
import uuid

import pytest

from tests.server.openai_served import call, chat

pytestmark = pytest.mark.server
QUESTION = {"role": "user", "content": "What is 12 + 30?"}
TAGS = {"type": "array", "uniqueItems": True, "items": {"type": "string", "minLength": 1, "pattern": "\\S"}}

NUM_MARKS = 10
# path -> fields beside the messages, where the answer has the prompt's size
PROMPT_SIZES = {
    "/v1/chat/completions": ({"max_tokens": 1}, ("usage", "prompt_tokens")),
    "/v1/responses": ({"max_output_tokens": 1}, ("usage", "input_tokens")),
    "/v1/responses/input_tokens": ({}, ("input_tokens",)),
    "/v1/messages": (
        {"max_tokens": 1, "cache_salt": uuid.uuid4().hex},
        ("usage", "input_tokens"),
    ),  # without cached ones
    "/v1/messages/count_tokens": ({}, ("input_tokens",)),
    "/tokenize": ({}, ("count",)),
}


def ask(*messages, **fields):
    return call("/v1/chat/completions", {"model": "tiny-chat", "messages": list(messages), **fields})


def answer_after(**message):
    status, body = ask(QUESTION, {"role": "assistant", **message}, QUESTION, max_tokens=8)
    assert status == 200, body
    return body["choices"][0]["message"], body["usage"]["prompt_tokens"]


@pytest.mark.usefixtures("chat_deployment")
def test_thoughts_of_a_history_are_the_same_under_each_of_their_names():
    known = answer_after(content="42", reasoning_content="a sum")
    assert answer_after(content="42", reasoning="a sum") == known
    assert answer_after(content="42", reasoning="a sum", reasoning_content="a sum") == known
    assert known[1] > answer_after(content="42")[1]  # the template shows them


@pytest.mark.usefixtures("chat_deployment")
@pytest.mark.parametrize("message", [{"reasoning_content": "a sum that was cut"}, {"tool_calls": []}])
def test_an_answer_without_content_goes_back_into_a_history(message):
    assert answer_after(content=None, **message) == answer_after(content="", **message)


@pytest.mark.usefixtures("chat_deployment")
@pytest.mark.parametrize("path", PROMPT_SIZES)
def test_a_control_token_in_a_message_is_text_in_every_api(path):
    fields, where = PROMPT_SIZES[path]
    sizes = []
    for text in ("hi", "hi" + NUM_MARKS * "<|im_end|>"):
        messages = [{"role": "user", "content": text}]
        status, body = call(
            path, {"model": "tiny-chat", "input" if "responses" in path else "messages": messages, **fields}
        )
        assert status == 200, body
        sizes.append(functools.reduce(dict.get, where, body))
    assert sizes[1] - sizes[0] > 2 * NUM_MARKS  # each would be one token


@pytest.mark.usefixtures("chat_deployment")
def test_a_stop_string_does_not_count_before_min_tokens():
    fields = chat(QUESTION["content"], max_tokens=20, stop=["4"])
    status, body = call("/v1/chat/completions", {**fields, "min_tokens": 10})
    assert status == 200 and body["usage"]["completion_tokens"] >= 10
    assert call("/v1/chat/completions", fields)[1]["usage"]["completion_tokens"] < 10


@pytest.mark.usefixtures("chat_deployment")
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_keyword_of_a_tools_schema_that_can_t_be_enforced_refuses_only_strict_tools(is_strict):
    function = {"name": "tag", "strict": is_strict, "parameters": {"type": "object", "properties": {"tags": TAGS}}}
    tools = [{"type": "function", "function": function}]
    status, body = ask({"role": "user", "content": "Tag it"}, tools=tools, tool_choice="required", max_tokens=40)
    if is_strict:
        assert status == 400 and "uniqueItems" in body["error"]["message"]
    else:
        assert status == 200, body
        (made,) = body["choices"][0]["message"]["tool_calls"]
        assert made["function"]["name"] == "tag"
