"""/v1/messages of a real deployment through Anthropic's client, beside chats of the same model."""

import asyncio
import json

import anthropic
import openai
import pytest

from tests.openai.text.strict_messages import message_of, whole_of
from tests.server.openai_served import URL
from tools.samples.chat_world import examples

pytestmark = pytest.mark.server
COUNT = 12  # tasks a kind
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
async def client(chat_deployment):
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, timeout=300) as client:
        yield client


def fields_of(task):
    turns = [message for message in task.messages if message["role"] != "system"]
    system = [message["content"] for message in task.messages if message["role"] == "system"]
    tools = [
        {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
        for function in (tool["function"] for tool in task.tools or ())
    ]
    fields = {"model": "tiny-chat", "max_tokens": 200, "messages": turns}
    fields |= {"system": system[0]} if system else {}
    fields |= {"tools": tools} if tools else {}
    return fields | ({"thinking": {"type": "adaptive"}} if task.thinking else {})


async def whole(client, fields):
    reply = await client.messages.with_raw_response.create(**fields)
    return message_of(await reply.read())


async def streamed(client, fields):
    events = [event async for event in await client.messages.create(**fields, stream=True)]
    return message_of(json.dumps(whole_of(events)).encode())


def parts_of(message):
    """Return text, thoughts and calls."""
    texts = "".join(block.text for block in message.content if block.type == "text").strip()
    thoughts = "".join(block.thinking for block in message.content if block.type == "thinking").strip()
    return texts, thoughts, [(block.name, block.input) for block in message.content if block.type == "tool_use"]


async def chat(client, task):
    fields = {"model": "tiny-chat", "messages": task.messages, "max_tokens": 200}
    fields |= {"tools": task.tools} if task.tools else {}
    fields |= {"reasoning_effort": "medium"} if task.thinking else {}
    message = (await client.chat.completions.create(**fields)).choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return (message.content or "").strip(), getattr(message, "reasoning_content", "").strip(), calls


@pytest.mark.parametrize("way", [whole, streamed])
async def test_held_out_tasks_have_the_answers_of_chats(client, way):
    tasks = [task for kind in ("sum", "json", "tool", "thought") for task in examples(99, COUNT, True, (kind,))]
    limit = asyncio.Semaphore(16)
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300) as chats:

        async def judge(task):
            async with limit:
                parts = parts_of(await way(client, fields_of(task)))
                assert parts == await chat(chats, task)
                return task.is_right(parts[0], parts[2])

        assert sum(await asyncio.gather(*map(judge, tasks))) >= 0.9 * len(tasks)


async def test_a_tool_loop_ends_with_an_answer(client):
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    fields = {"model": "tiny-chat", "max_tokens": 100, "tools": [WEATHER]}
    async with client.messages.stream(**fields, messages=messages) as stream:
        first = await stream.get_final_message()
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, call.input) == ("tool_use", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"degrees": 17, "sky": "rainy"}'}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    answer = await client.messages.create(**fields, messages=messages)
    assert "Oslo" in answer.content[0].text and answer.stop_reason == "end_turn"


async def test_a_forced_tool_is_called(client):
    answer = await client.messages.create(
        model="tiny-chat", max_tokens=100, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"},
        messages=[{"role": "user", "content": "What is 12 + 30?"}],
    )  # fmt: skip
    assert [block.name for block in answer.content if block.type == "tool_use"] == ["get_weather"]


async def test_counted_tokens_are_those_of_the_usage(client):
    prompt = {"model": "tiny-chat", "system": "Be brief.", "messages": [{"role": "user", "content": "What is 1 + 1?"}]}
    counted = await client.messages.count_tokens(**prompt, tools=[WEATHER])
    answer = await client.messages.create(**prompt, tools=[WEATHER], max_tokens=9)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    again = (await client.messages.create(**prompt, tools=[WEATHER], max_tokens=9)).usage
    assert again.cache_read_input_tokens > 0
    assert again.input_tokens + again.cache_read_input_tokens == counted.input_tokens


async def test_a_schema_is_kept_to(client):
    schema = {
        "type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"], "additionalProperties": False,
    }  # fmt: skip
    answer = await client.messages.create(
        model="tiny-chat", max_tokens=60, messages=[{"role": "user", "content": "Ada is 30. Answer in JSON."}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )  # fmt: skip
    assert json.loads(answer.content[0].text)["age"] == 30


async def test_the_client_knows_the_errors(client):
    fields = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(model="x", **fields)
    assert unknown.value.request_id and unknown.value.type == "not_found_error"
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await client.messages.create(model="tiny-chat", max_tokens=5, messages=long)
