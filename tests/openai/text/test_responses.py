"""/v1/responses over fake workers; every answer and event goes through the official client's models."""

import json

import pytest

from bireme.config import Recipe
from bireme.conversion import convert
from bireme.errors import RequestError, UnavailableError
from bireme.messages import Usage
from bireme.openai.http.event_stream import EventStream
from bireme.openai.http.pace import Pacer
from bireme.openai.text.response_answer import ResponseAnswer, ResponseEvents, ResponseForm
from bireme.openai.text.response_items import Conversation, input_items, sealed
from bireme.openai.text.response_request import ResponseBody, check_response
from bireme.pipelines.chat_answer import Choice, ResponseMeta
from bireme.text.output import TokenDelta
from bireme.text.parsers import create_parser, reasoning_format, tool_format
from bireme.text.parsers.base import ParserRequest
from bireme.workers.fake import token_at
from tests.openai.text.strict import events_of, response_of, whole_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
SPACE = {"type": "namespace", "name": "sums", "description": "Of whole numbers."}


def ask(bench, **fields):
    return bench.call("POST", "/v1/responses", {"model": "test", "input": "hi", "max_output_tokens": 4, **fields})


async def answered(bench, count=4, **fields):
    reply = ask(bench, **fields)
    await bench.workers.emit(count)
    return await reply.end()


def expected(prompt, count=4):
    return "".join(chr(token_at([ord(letter) for letter in prompt], position)) for position in range(count))


async def test_a_whole_response_has_the_published_form(frontend):
    reply = await answered(await frontend(), instructions="be", metadata={"a": "b"}, temperature=0.5)
    response = response_of(reply.data)
    assert response.output_text == expected("system:be\nuser:hi\nassistant:") and response.id.startswith("resp_")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.instructions, response.metadata, response.temperature) == ("be", {"a": "b"}, 0.5)
    assert (response.usage.output_tokens, response.output[0].status) == (4, "incomplete")


async def test_a_streamed_response_tells_everything_in_typed_events(frontend):
    bench = await frontend()
    reply = await answered(bench, stream=True)
    events = events_of(reply.data)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 4,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    last = whole_of(events)
    assert last["output"][0]["content"][0]["text"] == expected("user:hi\nassistant:")
    assert last["usage"]["total_tokens"] == last["usage"]["input_tokens"] + 4


async def test_verbosity_is_taken_and_shown_again(frontend):
    reply = await answered(await frontend(), text={"verbosity": "low"})
    assert response_of(reply.data).text.verbosity == "low"


async def test_usage_of_a_stream_may_be_asked_for_as_in_chats(frontend):
    reply = await answered(await frontend(), stream=True, stream_options={"include_usage": True})
    assert whole_of(events_of(reply.data))["usage"]["output_tokens"] == 4


async def test_tokens_of_a_prompt_are_counted_without_an_engine(frontend):
    bench = await frontend()
    body = {"model": "test", "instructions": "be", "input": "hi"}
    reply = await bench.call("POST", "/v1/responses/input_tokens", body).end()
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": len("system:be\nuser:hi\nassistant:")}
    assert not bench.workers.running
    assert (await bench.call("POST", "/v1/responses/compact", body).end()).status == 404


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview_2025_03_11", "mcp", "code_interpreter"])
async def test_tools_that_openai_runs_are_left_out_where_the_recipe_says_so(frontend, kind, caplog):
    bench = await frontend(chat={"drop_hosted_tools": True, "tool_parser": "hermes"}, name=f"test_{kind}")
    reply = await answered(bench, tools=[{"type": kind, "x": 1}, TOOL], model=f"test_{kind}")
    assert [tool.name for tool in response_of(reply.data).tools] == ["add"]
    assert f"hosted_tool_left_out recipe=test_{kind} type={kind}" in caplog.text


async def test_log_probabilities_come_when_they_are_included(frontend):
    bench = await frontend()
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = response_of((await answered(bench, **fields)).data)
    (part,) = whole.output[0].content
    assert len(part.logprobs) == 4 and len(part.logprobs[0].top_logprobs) == 2
    last = whole_of(events_of((await answered(bench, stream=True, **fields)).data))
    assert len(last["output"][0]["content"][0]["logprobs"]) == 4


def told(text, size=3, reason="stop", streams=True, tools=(), **options):
    """Return the answer to a model's text that comes in pieces of this size, as its response object."""
    form = ResponseForm(ResponseMeta("resp_1", "m", 1), {**SHOWN, "tools": tools})
    events = ResponseEvents()
    stream = EventStream(events, Pacer(), 1 << 20) if streams else None
    answer = ResponseAnswer(form, events if streams else None, stream, **options)
    parsing = ParserRequest(({"name": "add"}, {"name": "sums.add"}), "")
    choice = Choice(0, answer, create_parser(reasoning_format("think"), tool_format("hermes"), parsing))
    for at in range(0, len(text), size):
        choice.add(TokenDelta([1], text[at : at + size]))
    choice.add(TokenDelta([], finish_reason=reason, usage=Usage(prompt_tokens=3, completion_tokens=9)))
    answer.end()
    return json.loads(answer.json()) if stream is None else whole_of(events_of(stream.take()))


RECIPE = convert({"model": "none", "workers": {"decode": {"engine": "mocker"}}, "name": "test"}, Recipe, "test")
SHOWN = {
    "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0,
    "tool_choice": "auto", "tools": [],
}  # fmt: skip


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_reasoning_text_and_calls_are_items(size, streams):
    response = told(f"<think>hm</think>Well.\n{CALL}{CALL}", size, streams=streams)
    thoughts, message, first, second = response["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm"}] and thoughts["summary"] == []
    assert message["content"][0]["text"].strip() == "Well."
    assert json.loads(first["arguments"]) == {"a": 1} and first["call_id"] != second["call_id"]
    assert response["status"] == "completed"


@pytest.mark.parametrize("streams", [True, False])
async def test_reasoning_is_its_own_summary_when_one_is_asked_for(streams):
    response = told("<think>hm</think>x", streams=streams, has_summary=True, has_sealed=True)
    thoughts = response["output"][0]
    assert thoughts["summary"] == [{"type": "summary_text", "text": "hm"}] and "content" not in thoughts
    assert thoughts["encrypted_content"] == sealed("hm")


@pytest.mark.parametrize("text", ["", "<think>hm", f"<think>hm</think>\n{CALL[:-20]}", " \n"])
async def test_an_answer_that_is_cut_says_so_of_itself_and_its_last_item(text):
    response = told(text, reason="length")
    assert response["status"] == "incomplete" and response["output"][-1]["status"] == "incomplete"
    assert all(item["status"] == "completed" for item in response["output"][:-1])


async def test_white_space_between_calls_is_no_message():
    assert [item["type"] for item in told(f"\n{CALL}\n{CALL}\n")["output"]] == ["function_call"] * 2


async def test_an_error_in_mid_stream_is_a_failed_response(frontend):
    bench = await frontend(pipeline={"migration_limit": 0})
    reply = ask(bench, stream=True, max_output_tokens=100)
    await bench.workers.emit(2)
    bench.workers.down["decode"] = UnavailableError("gone")
    await bench.workers.lose("decode")
    last = whole_of(events_of((await reply.end()).data))
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
    assert last["output"][0]["status"] == "incomplete"


async def test_an_error_before_the_first_token_has_a_status(frontend):
    bench = await frontend()
    bench.workers.errors.append(RequestError("prompt: 9 tokens; limits.max_prompt_tokens is 5, shorten the prompt"))
    reply = await ask(bench, stream=True).end()
    assert reply.status == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


async def test_a_format_becomes_a_guide(frontend):
    bench = await frontend()
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    reply = ask(bench, text={"format": form}, seed=3)
    await bench.workers.reached("decode")
    sampling = bench.workers.running[0].request.sampling
    assert (sampling.guided_decoding, sampling.max_tokens, sampling.seed) == ({"json": {"type": "object"}}, 4, 3)
    await bench.workers.emit(4)
    assert response_of((await reply.end()).data).text.format.schema_ == {"type": "object"}


async def test_truncation_drops_the_oldest_messages_and_keeps_the_system_s(frontend):
    bench = await frontend(limits={"max_prompt_tokens": 50})
    items = [{"role": role, "content": f"{role}{turn}"} for turn in range(9) for role in ("user", "assistant")]
    items.append({"role": "user", "content": "last"})
    refused = await ask(bench, input=items, instructions="be").end()
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    reply = await answered(bench, input=items, instructions="be", truncation="auto")
    assert response_of(reply.data).output_text == expected("system:be\nuser:last\nassistant:")


def messages(*items):
    conversation = Conversation(RECIPE.limits, RECIPE.media)
    conversation.add(input_items([*items]))
    return conversation.messages


async def test_the_items_of_a_turn_are_one_message():
    asked, answer = {"role": "user", "content": "?"}, {"role": "user", "content": [{"type": "input_text", "text": "!"}]}
    output = told(f"<think>hm</think>Well.\n{CALL}{CALL}")["output"]
    calls = output[2:]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "2"} for call in calls]
    shown = messages(asked, *output, *results, answer)
    assert [message["role"] for message in shown] == ["user", "assistant", "tool", "tool", "user"]
    turn = shown[1]
    assert (turn["reasoning_content"], turn["content"].strip(), len(turn["tool_calls"])) == ("hm", "Well.", 2)
    assert shown[2]["tool_call_id"] == calls[0]["call_id"] and shown[4]["content"] == "!"


async def test_pictures_of_the_input_are_the_chat_s():
    parts = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": "data:,x", "detail": "auto"}]
    conversation = Conversation(RECIPE.limits, RECIPE.media)
    conversation.add(input_items([{"role": "user", "content": parts}]))
    assert conversation.messages[0]["content"] == [{"type": "text", "text": "?"}, {"type": "image"}]
    assert [picture.where for picture in conversation.pictures] == ["input[0].content[1].image_url"]


async def test_a_picture_that_a_call_puts_out_is_shown_behind_it():
    parts = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": "data:,x", "detail": "auto"}]
    conversation = Conversation(RECIPE.limits, RECIPE.media)
    conversation.add(input_items([{"type": "function_call_output", "call_id": "1", "output": parts}]))
    assert [message["content"] for message in conversation.messages] == [
        "?\nThe picture is in the user's message below.",
        [{"type": "image"}],
    ]


@pytest.mark.parametrize(
    ("choice", "names", "mode"),
    [
        ("auto", ["add", "mul"], "auto"),
        ("none", [], "none"),
        ({"type": "function", "name": "mul"}, ["mul"], "required"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, ["add"],
         "required"),
    ],
)  # fmt: skip
async def test_tool_choice_says_what_is_offered(choice, names, mode):
    body = ResponseBody(input="x", tools=[TOOL, {**TOOL, "name": "mul"}], tool_choice=choice)
    chat = check_response(body, RECIPE).chat
    assert ([function["name"] for function in chat.functions], chat.tool_mode) == (names, mode)


async def test_a_namespace_s_functions_are_offered_beside_all_others_and_shown_as_sent():
    tools = [{**SPACE, "tools": [{**TOOL, "description": "Adds."}, {**TOOL, "name": "mul"}]}, TOOL]
    request = check_response(ResponseBody(input="x", tools=tools), RECIPE)
    told = [(function["name"], function.get("description")) for function in request.chat.functions]
    assert told == [("sums.add", "Of whole numbers.\nAdds."), ("sums.mul", "Of whole numbers."), ("add", None)]
    assert request.shown["tools"] == tools and request.spaced["sums.mul"] == ("sums", "mul")


@pytest.mark.parametrize("streams", [True, False])
async def test_a_call_says_its_namespace_and_comes_back_as_the_model_wrote_it(streams):
    answer = CALL.replace('"add"', '"sums.add"')
    response = told(
        answer + CALL, streams=streams, spaced={"sums.add": ("sums", "add")}, tools=[{**SPACE, "tools": [TOOL]}]
    )
    spaced, plain = response["output"]
    assert (spaced["namespace"], spaced["name"]) == ("sums", "add")
    assert plain["name"] == "add" and "namespace" not in plain
    (turn,) = messages(spaced, plain)
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["sums.add", "add"]


@pytest.mark.parametrize(
    "item",
    [
        {"content": [{"type": "reasoning_text", "text": "hm"}]},
        {"summary": [{"type": "summary_text", "text": "hm"}]},
        {"encrypted_content": sealed("hm"), "content": None},
    ],
)
async def test_reasoning_comes_back_in_every_form(item):
    shown = messages({"type": "reasoning", "id": "rs_1", "summary": [], **item}, {"role": "assistant", "content": "x"})
    assert shown == [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]


BAD = {
    "no input": ({"input": None}, "input"),
    "empty input": ({"input": []}, "input"),
    "input of a number": ({"input": [5]}, "input[0]"),
    "an item's type": ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    "a reference": ({"input": [{"id": "msg_1"}]}, "input[0].type"),
    "a role": ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "a part's type": ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type"),
    "a part without text": (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text",
    ),
    "a file": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    "a file's name": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
    ),
    "a picture": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        "input[0].content[0].type",
    ),
    "reasoning of others": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAA?"}]}, "input[0].encrypted_content",
    ),
    "3000 items": ({"input": [{"role": "user", "content": "x"}] * 3000}, "input"),
    "messages": ({"messages": []}, "messages"),
    "n": ({"n": 2}, "n"),
    "max_tokens": ({"max_tokens": 2}, "max_tokens"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "too many": ({"top_logprobs": 10**6, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    "include": ({"include": ["x"]}, "include[0]"),
    "a tool of theirs": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a tool's field": ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    "a namespace's tool": (
        {"tools": [{**SPACE, "tools": [TOOL, {"type": "custom", "name": "x"}]}]}, "tools[0].tools[1].type",
    ),
    "a namespace's name": ({"tools": [TOOL, {**SPACE, "name": "s" * 125, "tools": [TOOL]}]}, "tools[1].tools[0].name"),
    "a namespace without a description": (
        {"tools": [{"type": "namespace", "name": "x", "tools": [TOOL]}]}, "tools[0].description",
    ),
    "two functions of a name": ({"tools": [{**SPACE, "tools": [TOOL]}, {**TOOL, "name": "sums.add"}]}, "tools"),
    "a tool's name": ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    "no parser": ({"tools": [TOOL]}, "tools"),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice"),
    "another tool": ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    "no tool allowed": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools",
    ),
    "a format without a schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "a format's name": (
        {"text": {"format": {"type": "json_schema", "name": "", "schema": {}}}}, "text.format.name",
    ),
    "a format and tools": ({"tools": [TOOL], "text": {"format": {"type": "json_object"}}}, "text.format"),
    "verbosity": ({"text": {"verbosity": "some"}}, "text.verbosity"),
    "summary": ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
    "effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    "truncation": ({"truncation": "some"}, "truncation"),
    "metadata": ({"metadata": {"a": "x" * 513}}, "metadata"),
    "prompt": ({"prompt": {"id": "x"}}, "prompt"),
    "moderation": ({"moderation": {"model": "x"}}, "moderation"),
    "service_tier": ({"service_tier": "scale"}, "service_tier"),
    "a tier and a priority": ({"service_tier": "flex", "priority": 3}, "service_tier"),
    "Dynamo's fields": ({"nvext": {"extra_fields": ["timing"]}}, "nvext.extra_fields"),
    "placement": ({"bireme": {"routing": {"query_only": True}}}, "bireme.routing.query_only"),
    "unknown": ({"inptu": 1}, "inptu"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_a_wrong_request_is_a_400_that_names_the_field(frontend, name):
    fields, param = BAD[name]
    reply = await ask(await frontend(), **fields).end()
    assert reply.status == 400 and reply.json()["error"]["param"] == param, reply.data


PARTS = [
    ({"type": "input_image", "image_url": "http://x"}, "input_image; this model reads text parts only"),
    ({"type": "input_file", "file_data": "data:,x", "filename": "a.pdf"}, "input_file; there are no files here"),
    ({"type": "input_file", "file_url": "http://x"}, "input_file; there are no files here"),
]


@pytest.mark.parametrize(("part", "reason"), PARTS)
async def test_a_part_that_is_not_served_is_refused_by_the_name_that_was_sent(frontend, part, reason):
    reply = await ask(await frontend(), input=[{"role": "user", "content": [part]}]).end()
    assert reply.json()["error"]["message"].startswith(f"input[0].content[0].type: {reason}")


@pytest.mark.parametrize("field", [{"background": True}, {"previous_response_id": "resp_1"}, {"store": True}])
async def test_without_a_store_what_needs_one_is_refused(frontend, field):
    bench = await frontend(frontend={"responses": {"max_responses": 0}})
    reply = await ask(bench, **field).end()
    assert reply.status == 400 and reply.json()["error"]["param"] == next(iter(field))
    assert (await answered(bench)).status == 200
