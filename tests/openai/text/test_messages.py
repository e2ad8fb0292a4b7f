"""/v1/messages over fake workers; every answer and event goes through Anthropic's client's own models."""

import asyncio
import functools
import hashlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.errors import RequestError, ResourceExhaustedError, UnavailableError
from bireme.messages import Usage
from bireme.openai.http.event_stream import EventStream
from bireme.openai.http.pace import Pacer
from bireme.openai.keys import ApiKeys, KeyEntry
from bireme.openai.text.messages_answer import SIGNATURE, MessageTemplate, StreamedMessage, WholeMessage
from bireme.openai.text.messages_request import REFUSED, MessagesBody, check_messages
from bireme.pipelines.chat_answer import Choice
from bireme.pipelines.json_body import decode_body
from bireme.text.output import TokenDelta
from bireme.text.parsers import create_parser, reasoning_format, tool_format
from bireme.text.parsers.base import ParserRequest
from bireme.workers.fake import token_at
from tests.openai.text.strict_messages import error_of, events_of, message_of, whole_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"name": "add", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
RECIPE = convert({"model": "none", "workers": {"decode": {"engine": "mocker"}}, "name": "test"}, Recipe, "test")
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def body_of(**fields):
    return {"model": "test", "max_tokens": 4, "messages": [USER], **fields}


def ask(bench, path="/v1/messages", headers=None, **fields):
    return bench.call("POST", path, body_of(**fields), headers)


async def answered(bench, count=4, **fields):
    reply = ask(bench, **fields)
    await bench.workers.emit(count)
    return await reply.end()


def expected(prompt, count=4):
    return "".join(chr(token_at([ord(letter) for letter in prompt], position)) for position in range(count))


def checked(**fields):
    return check_messages(decode_body(json.dumps(body_of(**fields)), MessagesBody, REFUSED), RECIPE)


async def test_a_whole_message_has_the_published_form(frontend):
    reply = await answered(await frontend(), system="be", temperature=0.5, metadata={"user_id": "me"})
    message = message_of(reply.data)
    prompt = "system:be\nuser:hi\nassistant:"
    assert [block.text for block in message.content] == [expected(prompt)]
    assert (message.model, message.stop_reason, message.stop_sequence) == ("test", "max_tokens", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), 4)
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_a_stream_tells_the_same_in_events(frontend):
    bench = await frontend()
    reply = ask(bench, stream=True)
    for _ in range(4):
        await bench.workers.emit()
        await asyncio.sleep(0.01)
    events = events_of((await reply.end()).data)
    assert [event.type for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * 4, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert events[0].message.usage.input_tokens == len("user:hi\nassistant:")
    assert whole_of(events)["content"][0]["text"] == expected("user:hi\nassistant:")
    assert reply.headers["request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_block_of_text_has_no_citations_not_even_null(frontend, stream):
    assert b"citations" not in (await answered(await frontend(), stream=stream)).data


def told(text, size=3, reason="stop", streams=True, usage=None, stop_string="", **fields):
    """Return the message of a model's text that comes in pieces of this size."""
    request = checked(max_tokens=9, **fields)
    template = MessageTemplate(request)
    stream = EventStream(template, Pacer(), 1 << 20)
    answer = StreamedMessage(request, template, stream) if streams else WholeMessage(request)
    parsing = ParserRequest(({"name": "add"},), "")
    choice = Choice(0, answer, create_parser(reasoning_format("think"), tool_format("hermes"), parsing))
    for at in range(0, len(text), size):
        choice.add(TokenDelta([1], text[at : at + size]))
    usage = usage or Usage(prompt_tokens=5, completion_tokens=9, cached_tokens=3)
    choice.add(TokenDelta([], finish_reason=reason, usage=usage, stop_string=stop_string))
    return whole_of(events_of(stream.take())) if streams else message_of(answer.json()).model_dump(exclude_unset=True)


both = pytest.mark.parametrize("streams", [True, False])


@both
@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_thoughts_text_and_calls_are_blocks_in_their_order(size, streams):
    message = told(f"<think>hm</think>Well.\n{CALL}\n{CALL}", size, streams=streams)
    thoughts, text, first, second = message["content"]
    assert (thoughts["thinking"], thoughts["signature"]) == ("hm", SIGNATURE)
    assert text["text"].strip() == "Well." and first["input"] == second["input"] == {"a": 1}
    assert first["id"].startswith("toolu_") and first["id"] != second["id"]
    assert message["stop_reason"] == "tool_use"


@both
async def test_thoughts_that_are_omitted_leave_their_signature(streams):
    thoughts, text = told("<think>hm</think>x", streams=streams, thinking={"type": "adaptive", "display": "omitted"})[
        "content"
    ]
    assert (thoughts["thinking"], thoughts["signature"], text["text"]) == ("", SIGNATURE, "x")


@both
async def test_white_space_alone_is_no_block(streams):
    assert [block["type"] for block in told(f" \n{CALL} \n {CALL}\n", streams=streams)["content"]] == ["tool_use"] * 2
    assert told(" \n ", streams=streams)["content"] == []


@both
async def test_cached_tokens_are_read_ones_and_not_counted_twice(streams):
    usage = told("<think>hm</think>x", 1, streams=streams)["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (2, 3, 0)
    assert usage["output_tokens"] == 9 and usage["output_tokens_details"]["thinking_tokens"] > 0


async def test_a_call_that_is_cut_has_the_arguments_so_far():
    text = '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2], "b": "x'
    assert told(text, 1, "length", streams=False)["content"][0]["input"] == {"a": [1, 2], "b": "x"}


STRANGE = [
    ('{"a": 1e999, "b": [-1e999, 1e308]}', {"a": None, "b": [None, 1e308]}),
    (f'{{"a": {1 << 70}, "b": 1e999}}', {"a": 1 << 70, "b": None}),
    (r'{"a": "x\ud83dy", "\ude00": ["\\ud83d"]}', {"a": "x\ufffdy", "\ufffd": ["\\ud83d"]}),
    (r'{"a": "\ud83d\ude00", "b": "\ude00\ud83d"}', {"a": "😀", "b": "\ufffd\ufffd"}),
    ('{"a": ' + "[" * 63 + "]" * 63 + "}", {"a": functools.reduce(lambda inner, _: [inner], range(62), [])}),
    (
        '{"a": ' + "[" * 62 + "1e999" + "]" * 62 + "}",
        {"a": functools.reduce(lambda inner, _: [inner], range(62), None)},
    ),
]


@pytest.mark.parametrize(("arguments", "value"), STRANGE)
async def test_arguments_that_few_readers_take_are_made_readable(arguments, value):
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert told(text, streams=False)["content"][0]["input"] == value


async def test_arguments_that_are_cut_inside_an_emoji_are_made_readable():
    text = r'<tool_call>{"name": "add", "arguments": {"a": "hi \ud83d\ude'
    assert told(text, 1, "length", streams=False)["content"][0]["input"] == {"a": "hi \ufffd"}


PARTS = [*'{}[]",:', *(r"\ud83d", r"\ude00", "\\", "u", "1", "-", "e999", "null", "NaN", "é", "\0", '"a": ')]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(PARTS), max_size=20).map("".join), st.sampled_from(["", '"', "[", '{"a": "']))
async def test_whatever_arguments_a_model_writes_the_message_can_be_read(text, begin):
    text = '<tool_call>{"name": "add", "arguments": {"a": ' + begin + text
    for reason in ("stop", "length"):
        assert isinstance(told(text, reason=reason, streams=False)["content"][0]["input"], dict)


ENDS = [
    ({"reason": "stop"}, "end_turn", None),
    ({"reason": "length"}, "max_tokens", None),
    ({"reason": "length", "usage": Usage(completion_tokens=5)}, "model_context_window_exceeded", None),
    ({"stop_string": "END", "stop_sequences": ["a", "END"]}, "stop_sequence", "END"),
    ({"stop_string": "recipe's own", "stop_sequences": ["a"]}, "end_turn", None),
]


@both
@pytest.mark.parametrize(("how", "reason", "sequence"), ENDS)
async def test_the_end_has_its_reason(how, reason, sequence, streams):
    message = told("x", streams=streams, **how)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_a_stop_sequence_is_told_by_the_engine_s_text(frontend):
    stop = expected("user:hi\nassistant:")[2]
    message = message_of((await answered(await frontend(), stop_sequences=[stop])).data)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == expected("user:hi\nassistant:", 2)


def test_a_conversation_is_the_template_s_messages():
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "c", "citations": None},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
            {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "d", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ]},
        USER,
    ]  # fmt: skip
    request = checked(messages=history, system=[{"type": "text", "text": "s"}, {"type": "text", "text": "t"}])
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert request.chat.messages == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "d\nhi"},
    ]


def test_what_changes_in_each_request_of_an_agent_is_left_out_of_the_prompt():
    billing = "x-anthropic-billing-header: cc_version=2; cch=a1b2;"
    for system in ([{"type": "text", "text": billing}, {"type": "text", "text": "s"}], f"{billing}\ns"):
        assert checked(system=system).chat.messages[0] == {"role": "system", "content": "s"}


def test_pictures_keep_their_place():
    request = checked(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, PNG]}]).chat
    assert request.messages[0]["content"] == [{"type": "text", "text": "a"}, {"type": "image"}]
    assert request.pictures[0].source.content == b"data:image/png;base64,aGk="


def test_pictures_of_results_are_shown_behind_them():
    content = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [PNG, {"type": "text", "text": "a"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "t2", "content": "b"},
        {"type": "text", "text": "c"},
    ]
    request = checked(messages=[{"role": "user", "content": content}]).chat
    assert [message["content"] for message in request.messages] == [
        "Error: \nThe picture is in the user's message below.\na",
        "b",
        [{"type": "image"}, {"type": "text", "text": "c"}],
    ]
    assert [picture.where for picture in request.pictures] == ["messages[0].content[0].content[0].image"]


HOSTED = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1, "user_location": {"type": "approximate"}}


def test_tools_that_a_server_runs_are_left_out_where_the_recipe_says_so():
    recipe = replace(RECIPE, chat=replace(RECIPE.chat, drop_hosted_tools=True))
    body = decode_body(json.dumps(body_of(tools=[HOSTED, TOOL])), MessagesBody, REFUSED)
    assert [function["name"] for function in check_messages(body, recipe).chat.functions] == ["add"]
    bash = decode_body(json.dumps(body_of(tools=[{"type": "bash_20250124", "name": "bash"}])), MessagesBody, REFUSED)
    with pytest.raises(RequestError, match=r"tools\[0\].type: bash_20250124"):  # the client runs it
        check_messages(bash, recipe)


CHOICES = [
    (None, "auto", True, 2),
    ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False, 2),
    ({"type": "any"}, "required", True, 2),
    ({"type": "tool", "name": "sub"}, "required", True, 1),
    ({"type": "none"}, "none", True, 0),
]


@pytest.mark.parametrize(("choice", "mode", "is_parallel", "count"), CHOICES)
def test_tools_and_their_choice_reach_the_pipeline(choice, mode, is_parallel, count):
    request = checked(tools=[TOOL, {**TOOL, "name": "sub", "type": "custom"}], tool_choice=choice).chat
    assert (request.tool_mode, request.is_parallel, len(request.functions)) == (mode, is_parallel, count)


def test_a_deferred_tool_is_offered_last_once_a_reference_has_named_it():
    tools = [{**TOOL, "name": "sub", "defer_loading": True}, TOOL, {**TOOL, "name": "mul", "defer_loading": True}]
    assert [function["name"] for function in checked(tools=tools).chat.functions] == ["add"]
    found = [{"type": "tool_reference", "tool_name": "sub"}] * 2
    turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": found[:1]}]}
    for result in ([turn], [turn, {"role": "user", "content": [{**turn["content"][0], "content": found}]}]):
        request = checked(tools=tools, messages=[USER, *result]).chat
        assert [function["name"] for function in request.functions] == ["add", "sub"]
        assert request.messages[1]["content"].startswith("sub is among the tools now.")


THOUGHTS = [
    ({}, {}),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"enable_thinking": True}),
    ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
    ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": 1}}, {"enable_thinking": 1}),
]


@pytest.mark.parametrize(("fields", "variables"), THOUGHTS)
def test_thinking_is_the_template_s_variable(fields, variables):
    assert checked(**fields).chat.variables == variables


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_a_schema_guides_the_answer(name):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = checked(**{name: form if name == "output_format" else {"format": form}}).chat
    assert request.guide == {"json": {"type": "object"}}


async def test_sampling_reaches_the_engine(frontend):
    bench = await frontend()
    reply = ask(bench, temperature=0.5, top_k=4, top_p=0.9, stop_sequences=["x"], bireme={"min_p": 0.1})
    await bench.workers.reached("decode")
    params = bench.workers.running[0].request.sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 4, 0.9, 0.1)
    assert (params.stop, params.max_tokens) == (("x",), 4)
    reply.leave()
    await reply.end()


async def test_tokens_are_counted_without_an_engine(frontend):
    bench = await frontend()
    body = {"model": "test", "system": "be", "messages": [USER]}
    reply = await bench.call("POST", "/v1/messages/count_tokens", body).end()
    assert reply.json() == {"input_tokens": len("system:be\nuser:hi\nassistant:")} and not bench.workers.running


TURN = {"role": "assistant", "content": "x"}


def blocks(*content, role="user"):
    return {"messages": [USER, {"role": role, "content": list(content)}, USER]}


BAD = {
    "no JSON": (b"{", ""),
    "no max_tokens": ({"max_tokens": ...}, "max_tokens: missing"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens: 0"),
    "no messages": ({"messages": []}, "messages: empty"),
    "no blocks": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: empty"),
    "a role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role: wizard"),
    "a call to go on with": (
        {"messages": [USER, {**TURN, "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]},
        "continue_final_message: the last message has tool calls",
    ),
    "a user's message to go on with": ({"continue_final_message": True}, "continue_final_message: the last message's"),
    "a document": (blocks({"type": "document", "source": {}}), "messages[1].content[0].type: document; documents are"),
    "an unknown block": (blocks({"type": "x"}), "messages[1].content[0].type: x"),
    "an unknown field": (blocks({"type": "text", "text": "a", "b": 1}), "messages[1].content[0].b: unknown"),
    "a file": (
        blocks({"type": "image", "source": {"type": "file", "file_id": "x"}}),
        "messages[1].content[0].source.type: file; there are no files",
    ),
    "a picture that nobody sees": (blocks(PNG), "messages[1].content[0].type: image; this model reads text"),
    "a picture of the assistant": (blocks(PNG, role="assistant"), "messages[1].content[0].type: image; not in"),
    "a picture as a result that nobody sees": (
        blocks({"type": "tool_result", "tool_use_id": "t", "content": [PNG]}),
        "messages[1].content[0].content[0].type: image; this model reads text",
    ),
    "a call by the user": (
        blocks({"type": "tool_use", "id": "t", "name": "f", "input": {}}),
        "messages[1].content[0].type: tool_use; not in",
    ),
    "a tool of the server": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]},
        "tools[0].max_uses: the server runs no tools",
    ),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema: missing"),
    "a known tool": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: bash_20250124"),
    "a tool's name": ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name: send"),
    "nothing but tools to be found": ({"tools": [{**TOOL, "defer_loading": True}]}, "tools: all have defer_loading"),
    "an unknown tool found": (
        blocks({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "f"}]}),
        "messages[1].content[0].content[0].tool_name: f; no such tool",
    ),
    "a reference that nothing has found": (
        blocks({"type": "tool_reference", "tool_name": "add"}),
        "messages[1].content[0].type: tool_reference; it goes",
    ),
    "examples": ({"tools": [{**TOOL, "input_examples": []}]}, "tools[0].input_examples: not served"),
    "two of a name": ({"tools": [TOOL, TOOL]}, "tools: two"),
    "2000 tools": ({"tools": [TOOL] * 2000}, "tools: 2000"),
    "tools that nobody reads": ({"tools": [TOOL]}, "tools: the model has no tool parser"),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice: without"),
    "a choice of none": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: x"),
    "a choice without a name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "thoughts between tools": ({"thinking": {"type": "between_tools"}}, "thinking.type: between_tools; send"),
    "a budget of none": ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    "a schema beside tools": (
        {"tools": [TOOL], "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format: not together with tools",
    ),
    "5000 stops": ({"stop_sequences": ["x"] * 5000}, "stop_sequences: 5000"),
    "temperature": ({"temperature": 3}, "temperature: 3"),
    "speed": ({"speed": "fast"}, "speed: fast; there is one"),
    "containers": ({"container": "x"}, "container: there are no"),
    "an edit": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0].type: clear_tool_uses_20250919; remove old",
    ),
    "a name of OpenAI's": ({"stop": ["x"]}, "stop: unknown field"),
    "a surrogate": (b'{"model":"test","max_tokens":1,"messages":[{"role":"user","content":"\\ud800"}]}', ""),
    "depth": (b'{"model":"test","max_tokens":1,"messages":' + b"[" * 100_000, ""),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_wrong_request_is_a_400_that_names_the_field(frontend, name):
    fields, message = BAD[name]
    data = fields
    if isinstance(fields, dict):
        data = {name: value for name, value in body_of(**fields).items() if value is not ...}
    reply = await (await frontend()).call("POST", "/v1/messages", data).end()
    error = error_of(reply.data)
    assert (reply.status, error.type) == (400, "invalid_request_error") and error.message.startswith(message), error


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ResourceExhaustedError("the queue is full"), 529, "overloaded_error"),
        (UnavailableError("no worker"), 529, "overloaded_error"),
        (RequestError("prompt: 9 tokens; limits.max_prompt_tokens is 5"), 400, "invalid_request_error"),
    ],
)
async def test_errors_of_workers_have_that_api_s_status_and_type(frontend, error, status, kind):
    bench = await frontend(pipeline={"migration_limit": 0, "stall_timeout_s": 0.1})
    bench.workers.errors += [error] * 20
    reply = await ask(bench, stream=True).end()
    assert (reply.status, error_of(reply.data).type) == (status, kind)
    assert status != 529 or reply.headers["retry-after"] == "1"
    assert status != 400 or error_of(reply.data).message.startswith("prompt is too long: 9 tokens")


async def test_errors_of_the_frontend_have_that_api_s_form(frontend):
    bench = await frontend(frontend={"max_body_bytes": 100})
    unknown = await bench.call("POST", "/v1/messages", {"model": "x", "max_tokens": 1, "messages": []}).end()
    assert (unknown.status, error_of(unknown.data).type) == (404, "not_found_error")
    large = await bench.call("POST", "/v1/messages", b"x" * 101).end()
    assert (large.status, large.json()["error"]["type"]) == (413, "request_too_large")
    path = await bench.call("POST", "/v1/messages/batches", {}).end()
    assert (path.status, error_of(path.data).type) == (404, "not_found_error")
    method = await bench.call("GET", "/v1/messages").end()
    assert (method.status, error_of(method.data).type) == (405, "invalid_request_error")


async def test_keys_and_their_limits_have_that_api_s_errors(frontend):
    entry = KeyEntry(name="alice", sha256=hashlib.sha256(b"secret").hexdigest(), requests_per_minute=1)
    bench = await frontend(ApiKeys((entry,)))
    refused = await ask(bench, headers={"x-api-key": "wrong"}).end()
    assert (refused.status, error_of(refused.data).type) == (401, "authentication_error")
    key = {"x-api-key": "secret", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    assert (await ask(bench, "/v1/messages/count_tokens", key, max_tokens=0).end()).status == 400
    limited = await ask(bench, headers=key).end()
    assert (limited.status, error_of(limited.data).type) == (429, "rate_limit_error")
    assert int(limited.headers["retry-after"]) >= 1


async def test_an_error_in_mid_stream_is_the_last_event(frontend):
    bench = await frontend(pipeline={"migration_limit": 0})
    reply = ask(bench, stream=True, max_tokens=100)
    await bench.workers.emit(2)
    bench.workers.down["decode"] = UnavailableError("gone")
    await bench.workers.lose("decode")
    *_, last, end = (await reply.end()).data.split(b"\n\n")
    head, _, body = last.partition(b"\ndata: ")
    assert (head, end) == (b"event: error", b"") and error_of(body).type == "overloaded_error"


async def test_a_silent_stream_is_pinged(frontend):
    bench = await frontend(frontend={"comment_interval_s": 0.05})
    reply = ask(bench, stream=True)
    await bench.workers.reached("decode")
    await asyncio.sleep(0.2)
    assert reply.status == 200 and reply.data.startswith(b'event: ping\ndata: {"type":"ping"}\n\n')
    await bench.workers.emit(4)
    whole_of(events_of((await reply.end()).data))


async def test_timing_comes_on_request(frontend):
    bench = await frontend()
    assert (await answered(bench, bireme={"return_timing": True})).json()["bireme"]["timing"]
    assert b'"bireme":{"timing"' in (await answered(bench, bireme={"return_timing": True}, stream=True)).data


RICH = {
    **body_of(), "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"], "temperature": 0.5, "top_k": 4,
    "tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}, "metadata": {"user_id": "me"},
    "thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"}, "bireme": {"min_p": 0.1},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, PNG]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [
            {"type": "text", "text": "2"},
        ]}]},
    ],
}  # fmt: skip
WORDS = ["text", "image", "tool_use", "tool_result", "thinking", "document", "any", "disabled", "system"]
NAMES = ["type", "text", "content", "name", "input", "role", "source", "x"]
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([path for path in places(RICH) if path]), ANYTHING, st.booleans())
def test_whatever_stands_in_a_field_is_taken_or_refused(path, value, is_new):
    body = json.loads(json.dumps(RICH))
    place = functools.reduce(lambda at, key: at[key], path[:-1], body)
    place["xxx" if is_new and isinstance(place, dict) else path[-1]] = value
    try:
        request = check_messages(decode_body(json.dumps(body), MessagesBody, REFUSED), RECIPE)
    except RequestError as error:
        assert re.search("[:;] ", str(error))
    else:
        assert request.chat.messages and json.dumps(request.chat.messages)
