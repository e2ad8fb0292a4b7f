"""Anthropic's package: whole, streams, a tool loop, thinking, a typed answer, counts, both kinds of client."""

import asyncio
import os

import anthropic
import pydantic

MODEL = os.environ["MODEL"]
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
client = anthropic.Anthropic(base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), api_key="none", max_retries=0)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


def ask(content: str, **fields):
    return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": content}], **fields}


answer = client.messages.create(**ask("What is 12 + 30?", system="Be brief.", stop_sequences=["\n\n\n"]))
assert answer.content[0].text == "42" and answer.stop_reason == "end_turn" and answer._request_id, answer
with client.messages.stream(**ask("What is 12 + 30?")) as stream:
    assert "".join(stream.text_stream) == "42"
    assert stream.get_final_message().usage.output_tokens > 0
thought = client.messages.create(**ask("What is 27 + 35?", thinking={"type": "enabled", "budget_tokens": 1024}))
assert [block.type for block in thought.content] == ["thinking", "text"], thought

conversation = ask("What is the weather in Oslo?", tools=[WEATHER])
with client.messages.stream(**conversation) as stream:
    called = stream.get_final_message()
call = next(block for block in called.content if block.type == "tool_use")
assert call.input == {"city": "Oslo"} and called.stop_reason == "tool_use", called
conversation["messages"] += [
    called.to_param(),
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": '{"sky": "rainy"}'}]},
]
assert client.messages.create(**conversation).content[0].text
assert client.messages.count_tokens(model=MODEL, messages=conversation["messages"], tools=[WEATHER]).input_tokens > 0

parsed = client.messages.parse(**ask("Ada is 30. Answer in JSON."), output_format=Person)
assert parsed.parsed_output.age == 30, parsed
beta = client.beta.messages.create(**ask("What is 12 + 30?"), betas=["interleaved-thinking-2025-05-14"])
assert beta.content[0].text == "42", beta
try:
    client.messages.create(**ask("x", extra_body={"temperature": 9}))
except anthropic.BadRequestError as error:
    assert "temperature" in error.message and error.type == "invalid_request_error"
else:
    raise AssertionError("a wrong temperature was taken")


async def several() -> None:
    async with anthropic.AsyncAnthropic(base_url=client.base_url, auth_token="none", max_retries=0) as own:
        answers = await asyncio.gather(*(own.messages.create(**ask("What is 12 + 30?")) for _ in range(4)))
    assert {answer.content[0].text for answer in answers} == {"42"}


asyncio.run(several())
print("ok")
