"""Does the answer mean something? Held-out tasks of tiny-chat through the frontend, aggregated and disaggregated."""

import asyncio
import json
from collections import Counter

import httpx
import openai
import pytest

from models.training.chat_world import examples

pytestmark = pytest.mark.server
COUNTS = [5, pytest.param(20, marks=pytest.mark.soak)]  # tasks a kind


@pytest.fixture
async def client(tiny_chat):
    async with openai.AsyncOpenAI(base_url=f"{tiny_chat.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def fields_of(task):
    fields = {"model": "tiny-chat", "messages": task.messages, "max_tokens": 200}
    if task.tools:
        fields["tools"] = task.tools
    if task.thinking:
        fields["reasoning_effort"] = "medium"
    return fields


async def whole(client, task):
    """Return content and tool calls of one answer."""
    message = (await client.chat.completions.create(**fields_of(task))).choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    return message.content or "", calls


async def streamed(client, task):
    """Return the same, put together from chunks."""
    text, calls = "", []
    async for chunk in await client.chat.completions.create(**fields_of(task), stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for part in delta.tool_calls or []:
            if part.index == len(calls):
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("way", [whole, streamed])
async def test_held_out_tasks_are_answered_rightly(client, way, count):
    tasks = [task for kind in ("sum", "json", "tool", "thought") for task in examples(99, count, True, (kind,))]
    limit = asyncio.Semaphore(16)

    async def judge(task):
        async with limit:
            return task.kind, task.is_right(*await way(client, task))

    results = await asyncio.gather(*map(judge, tasks))
    right = Counter(kind for kind, is_right in results if is_right)
    print(f"held_out_accuracy way={way.__name__} of={count} {dict(right)}")
    assert all(right[kind] >= 0.95 * count for kind in ("sum", "json", "tool", "thought")), right


async def test_a_forced_sequence_is_the_answer_of_a_chat(client, tiny_chat, request):
    """docs/logits_processor.md's example, over the engine's own processors."""
    if "trtllm-recipes/tiny-chat-disagg" in request.node.name:
        pytest.skip("TensorRT-LLM runs no processors when disaggregated: test_text_equality.py has the refusal")
    text = {"model": "tiny-chat", "prompt": "red blue red"}
    ids = httpx.post(f"{tiny_chat.url}/tokenize", json=text).json()["tokens"]
    forced = [{"name": "forced_sequence", "args": {"token_ids": ids}}]
    answer = await client.chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "What is 2 + 2?"}],
        extra_body={"bireme": {"logits_processors": forced}},
    )
    assert answer.choices[0].message.content.strip() == "red blue red"
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens <= len(ids) + 1


async def test_reasoning_is_told_apart_from_the_answer(client):
    messages = [{"role": "user", "content": "What is 27 + 35?"}]
    answer = await client.chat.completions.create(model="tiny-chat", messages=messages, reasoning_effort="medium")
    message = answer.choices[0].message
    assert message.content.strip() == "62" and "<think>" not in message.content
    assert message.reasoning_content and answer.usage.completion_tokens_details.reasoning_tokens > 0


WEATHER = next(task for task in examples(7, 1, True, ("tool",)))


async def test_a_required_call_is_made_and_has_the_reason_tool_calls(client):
    fields = {**fields_of(WEATHER), "tool_choice": "required"}
    answer = await client.chat.completions.create(**fields)
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.tool_calls


async def test_a_named_function_is_the_one_that_is_called(client):
    name = WEATHER.tools[-1]["function"]["name"]
    choice = {"type": "function", "function": {"name": name}}
    answer = await client.chat.completions.create(**{**fields_of(WEATHER), "tool_choice": choice})
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == [name]


async def test_with_tool_choice_none_nothing_is_called(client):
    answer = await client.chat.completions.create(**{**fields_of(WEATHER), "tool_choice": "none"})
    assert not answer.choices[0].message.tool_calls
