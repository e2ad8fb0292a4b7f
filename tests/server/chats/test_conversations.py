"""Conversations of several turns through the frontend, as the official client holds them."""

import asyncio
import json
from collections import Counter

import openai
import pytest

from models.training.chat_world import TOOLS, examples

pytestmark = pytest.mark.server
COUNT = 30  # held-out conversations a kind
QUESTIONS = ("Hello, I am Rosa.", "What is 12 + 30?", "Say plam three times.", "What colour is the sky?")


@pytest.fixture
async def client(tiny_chat):
    async with openai.AsyncOpenAI(base_url=f"{tiny_chat.url}/v1", api_key="none") as client:
        yield client


async def ask(client, messages, **fields):
    fields = {"max_tokens": 100, **fields}
    return await client.chat.completions.create(model="tiny-chat", messages=messages, **fields)


async def whole(client, messages, **fields):
    return (await ask(client, messages, **fields)).choices[0].message.content


async def streamed(client, messages, **fields):
    return "".join(
        [chunk.choices[0].delta.content or "" async for chunk in await ask(client, messages, stream=True, **fields)]
    )


async def converse(client, questions=QUESTIONS, way=whole, system="End each answer with dak."):
    """Hold a conversation and return the answers."""
    messages, answers = [{"role": "system", "content": system}], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(await way(client, messages))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.parametrize("kind", ["two_turns", "tool_answer"])
async def test_held_out_conversations_are_answered_rightly(client, kind):
    tasks = list(examples(11, COUNT, True, (kind,)))

    async def judge(task):
        content = await whole(client, _for_the_wire(task.messages), **({"tools": task.tools} if task.tools else {}))
        return task.is_right(content or "", [])

    results = Counter(await asyncio.gather(*map(judge, tasks)))
    print(f"held_out_conversations kind={kind} right={results[True]} of={COUNT}")
    assert results[True] >= 0.9 * COUNT


def _for_the_wire(messages):
    """Give calls their ids and arguments as JSON, as OpenAI has them."""
    shown = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            message["tool_calls"] = [
                {"id": "call_1", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
                for call in calls
            ]
        if message["role"] == "tool":
            message["tool_call_id"] = "call_1"
        shown.append(message)
    return shown


async def test_a_streamed_conversation_says_the_same_as_a_whole_one(client):
    assert await converse(client, way=streamed) == await converse(client)


async def test_conversations_side_by_side_do_not_mix(client):
    systems = [f"End each answer with {word}." for word in ("plam", "dak", "loost", "brent")]
    alone = [await converse(client, system=system) for system in systems]
    assert await asyncio.gather(*(converse(client, system=system) for system in systems)) == alone
    assert len({tuple(answers) for answers in alone}) == len(systems)


async def test_a_turn_computes_only_what_is_new(client):
    messages = [{"role": "user", "content": "Repeat after me: " + "kite " * 60}]
    first = await ask(client, messages, max_tokens=40)
    known = first.usage.total_tokens
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Thank you!"},
    ]
    second = (await ask(client, messages)).usage
    assert second.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 32 * 32 - 32
    assert second.prompt_tokens > known and second.prompt_tokens_details.cached_tokens < second.prompt_tokens


async def test_the_clients_own_message_objects_can_be_sent_back(client):
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    tools = [TOOLS["get_weather"]]
    called = (await ask(client, messages, tools=tools)).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": '{"degrees": 3, "sky": "windy"}'}
    assert await whole(client, [*messages, called, result], tools=tools) == "It is windy in Oslo, 3 degrees."


async def test_thoughts_may_be_sent_back_and_the_next_turn_is_answered(client):
    messages = [{"role": "user", "content": "What is 27 + 35?"}]
    thought = (await ask(client, messages, reasoning_effort="medium")).choices[0].message
    assert thought.reasoning_content and thought.content.strip() == "62"
    follow = [*messages, thought, {"role": "user", "content": "What colour is the sky?"}]
    assert (await whole(client, follow)).startswith("blue")


async def test_a_conversation_that_outgrows_the_context_is_told_so_and_can_be_shortened(client):
    turns = [{"role": role, "content": "oar " * 200} for role in ("user", "assistant") * 4]
    messages = [*turns, {"role": "user", "content": "What is 12 + 30?"}]
    for way in (whole, streamed):
        with pytest.raises(openai.BadRequestError) as refused:
            await way(client, messages)
        assert refused.value.code == "context_length_exceeded" and "1024" in str(refused.value)
    assert await whole(client, messages[-1:]) == "42"
