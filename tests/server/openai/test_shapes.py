"""Every response of the frontend against the types of OpenAI's own package, whole and in chunks."""

import json
import urllib.request

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.openai_served import URL, call, chat
from tests.server.openai_shapes import check

pytestmark = pytest.mark.server
SUM = "What is 12 + 30?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
CHATS = {
    "plain": chat(SUM),
    "logprobs": chat(SUM, logprobs=True, top_logprobs=3),
    "several": chat(SUM, n=3, temperature=1.0),
    "length": chat(SUM, max_tokens=1),
    "stop": chat("Count from 1 to 9.", stop=["3"]),
    "thinking": chat("What is 27 + 35?", reasoning_effort="medium"),
    "tool": chat("What is the weather in Oslo?", tools=TOOLS, tool_choice="required"),
    "json": chat("Ada is 30. Answer in JSON.", response_format=JSON, max_tokens=100),
    "timing": chat(SUM, bireme={"return_timing": True}),
}
COMPLETIONS = {
    "plain": {"prompt": "One day", "max_tokens": 5},
    "several": {"prompt": ["One day", "Two"], "n": 2, "max_tokens": 3},
    "logprobs": {"prompt": "One day", "logprobs": 2, "max_tokens": 3},
    "echo": {"prompt": "One day", "echo": True, "max_tokens": 3},
}


def chunks(path, body):
    """Return the JSON of each event; the last must be [DONE]."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        events = reply.read().decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    return [json.loads(event[6:]) for event in events[:-1]]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_completion_is_one(chat_deployment, name):
    status, body = call("/v1/chat/completions", CHATS[name])
    assert status == 200
    check(ChatCompletion, body)


@pytest.mark.parametrize("name", CHATS)
def test_chunks_of_a_chat_are_chunks(chat_deployment, name):
    found = chunks("/v1/chat/completions", CHATS[name])
    for chunk in found:
        check(ChatCompletionChunk, chunk)
    assert len({chunk["id"] for chunk in found}) == 1 and found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [bool(chunk.get("usage")) for chunk in found] == [False] * (len(found) - 1) + [True]
    reasons = [choice["finish_reason"] for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
    assert len(reasons) == CHATS[name].get("n", 1)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_is_one_and_so_are_its_chunks(chat_deployment, name):
    body = {"model": "tiny-chat", **COMPLETIONS[name]}
    status, whole = call("/v1/completions", body)
    assert status == 200
    check(Completion, whole)
    for chunk in chunks("/v1/completions", body):
        for choice in chunk["choices"]:  # the package types whole answers alone, where a reason is always known
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(Completion, chunk)


def test_models_are_models(chat_deployment):
    status, body = call("/v1/models")
    assert status == 200 and body["object"] == "list"
    for model in body["data"]:
        for name in ("root", "parent", "max_model_len", "permission"):  # vLLM's
            del model[name]
        check(Model, model)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", chat(SUM, temperature=9), 400),
        ("/v1/chat/completions", {**chat(SUM), "model": "none"}, 404),
        ("/v1/models/none", None, 404),
        ("/none", None, 404),
        ("/v1/models", {}, 405),
    ],
)
def test_an_error_has_all_of_its_fields(chat_deployment, path, body, status):
    found, reply = call(path, body)
    assert found == status and set(reply) == {"error"}
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert isinstance(reply["error"]["message"], str) and isinstance(reply["error"]["type"], str)
