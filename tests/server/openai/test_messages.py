"""/v1/messages of a real deployment through Anthropic's client."""

import json

import anthropic
import pytest

from tests.server.openai_served import URL

pytestmark = pytest.mark.server
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
async def client(chat_deployment):
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, timeout=300) as client:
        yield client


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
