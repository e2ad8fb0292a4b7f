"""A call that the model decides on itself keeps to its schema, where the engine follows a guide that a token begins."""

import json

import openai
import pytest

from models.training.chat_world import examples

pytestmark = pytest.mark.server
MINUTES = [5, 25]  # nothing that anybody asks for


PROPERTY = f'"minutes": {json.dumps({"type": "integer", "enum": MINUTES})}'


def timers(count):
    """Return requests after which the model sets a timer for as long as was asked, and tools that do not take it."""
    tasks = [task for task in examples(7, 300, True, ("tool",)) if task.identity.startswith("set_timer")]
    assert len(tasks) >= count
    tools = [
        json.loads(json.dumps(task.tools).replace('"minutes": {"type": "integer"}', PROPERTY)) for task in tasks[:count]
    ]
    return [
        {"model": "tiny-chat", "messages": task.messages, "tools": offered, "max_tokens": 200}
        for task, offered in zip(tasks, tools, strict=False)
    ]


@pytest.fixture
async def client(tiny_chat):
    async with openai.AsyncOpenAI(base_url=f"{tiny_chat.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def is_held(request):
    return "trtllm" not in request.node.name


def minutes_of(call):
    assert call.function.name == "set_timer"
    return json.loads(call.function.arguments)["minutes"]


@pytest.mark.parametrize("fields", [{}, {"reasoning_effort": "medium"}, {"parallel_tool_calls": False}], ids=str)
async def test_a_call_of_a_whole_answer_keeps_to_its_schema(client, is_held, fields):
    for asked in timers(3):
        message = (await client.chat.completions.create(**asked, **fields)).choices[0].message
        [call] = message.tool_calls
        assert (minutes_of(call) in MINUTES) is is_held
        assert bool(getattr(message, "reasoning_content", "")) is ("reasoning_effort" in fields)


async def test_a_call_of_a_stream_keeps_to_its_schema(client, is_held):
    for asked in timers(3):
        arguments = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            arguments += "".join(part.function.arguments for part in chunk.choices[0].delta.tool_calls or [])
        assert (json.loads(arguments)["minutes"] in MINUTES) is is_held


async def test_a_schema_that_can_not_be_enforced_is_loosened_unless_it_is_strict(client, is_held):
    if not is_held:
        pytest.skip("the engine follows no guide that a token begins")
    asked = timers(1)[0]
    for tool in asked["tools"]:
        tool["function"]["parameters"]["properties"]["more"] = {"type": "array", "uniqueItems": True}
    answer = await client.chat.completions.create(**asked)
    assert minutes_of(answer.choices[0].message.tool_calls[0]) in MINUTES
    asked["tools"][0]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="properties/more: uniqueItems can't be enforced"):
        await client.chat.completions.create(**asked)
