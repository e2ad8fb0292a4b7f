"""Held-out tasks of tiny-chat have the same answers through chats, responses and messages, whole and streamed."""

import asyncio
import json

import anthropic
import openai
import pytest

from models.training.chat_world import examples
from tests.openai.text import strict, strict_messages
from tests.server.openai_served import URL

pytestmark = pytest.mark.server
KINDS = ("sum", "json", "tool", "thought")
COUNTS = [12, pytest.param(100, marks=pytest.mark.soak)]  # tasks a kind


def functions_of(task):
    return [tool["function"] for tool in task.tools]


def response_fields(task):
    fields = {"model": "tiny-chat", "input": task.messages, "max_output_tokens": 200}
    fields |= {"reasoning": {"effort": "medium"}} if task.thinking else {}
    return fields | {"tools": [{"type": "function", "strict": False, **one} for one in functions_of(task)]}


def message_fields(task):
    turns = [message for message in task.messages if message["role"] != "system"]
    system = [message["content"] for message in task.messages if message["role"] == "system"]
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in functions_of(task)
    ]
    fields = {"model": "tiny-chat", "max_tokens": 200, "messages": turns, "tools": tools}
    fields |= {"system": system[0]} if system else {}
    return fields | ({"thinking": {"type": "adaptive"}} if task.thinking else {})


def parts_of_response(response):
    """Return text, thoughts and calls."""
    items = {kind: [one for one in response.output if one.type == kind] for kind in ("reasoning", "function_call")}
    thoughts = "".join(part.text for item in items["reasoning"] for part in item.content or ())
    calls = [(call.name, json.loads(call.arguments)) for call in items["function_call"]]
    return response.output_text.strip(), thoughts.strip(), calls


def parts_of_message(message):
    texts = "".join(block.text for block in message.content if block.type == "text").strip()
    thoughts = "".join(block.thinking for block in message.content if block.type == "thinking").strip()
    return texts, thoughts, [(block.name, block.input) for block in message.content if block.type == "tool_use"]


async def response(client, task):
    reply = await client.responses.with_raw_response.create(**response_fields(task))
    return parts_of_response(strict.response_of(reply.content))


async def streamed_response(client, task):
    events = [event async for event in await client.responses.create(**response_fields(task), stream=True)]
    return parts_of_response(strict.response_of(json.dumps(strict.whole_of(events)).encode()))


async def message(client, task):
    reply = await client.messages.with_raw_response.create(**message_fields(task))
    return parts_of_message(strict_messages.message_of(await reply.read()))


async def streamed_message(client, task):
    events = [event async for event in await client.messages.create(**message_fields(task), stream=True)]
    return parts_of_message(strict_messages.message_of(json.dumps(strict_messages.whole_of(events)).encode()))


async def chat(client, task):
    fields = {"model": "tiny-chat", "messages": task.messages, "max_tokens": 200}
    fields |= {"tools": task.tools} if task.tools else {}
    fields |= {"reasoning_effort": "medium"} if task.thinking else {}
    message = (await client.chat.completions.create(**fields)).choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return (message.content or "").strip(), getattr(message, "reasoning_content", "").strip(), calls


async def answers(make, way, tasks):
    limit = asyncio.Semaphore(16)
    async with make() as client:

        async def one(task):
            async with limit:
                return await way(client, task)

        return await asyncio.gather(*map(one, tasks))


def of_openai():
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)


def of_anthropic():
    return anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, timeout=300)


WAYS = [
    (of_openai, response), (of_openai, streamed_response), (of_anthropic, message), (of_anthropic, streamed_message),
]  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
async def test_held_out_tasks_have_the_same_answers_in_every_form(chat_deployment, count):
    tasks = [task for kind in KINDS for task in examples(99, count, True, (kind,))]
    expected = await answers(of_openai, chat, tasks)
    for make, way in WAYS:
        assert await answers(make, way, tasks) == expected, way.__name__
    right = sum(task.is_right(text, calls) for task, (text, _, calls) in zip(tasks, expected, strict=True))
    print(f"held_out_accuracy right={right} of={len(tasks)}")
    assert right >= 0.9 * len(tasks)
