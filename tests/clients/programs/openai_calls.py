"""The official package: models, chats whole and streamed, a tool loop, parse(), completions, both kinds of client."""

import asyncio
import json
import os

import openai
import pydantic

MODEL = os.environ["MODEL"]
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
client = openai.OpenAI(max_retries=0)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


def chat(content: str, **fields):
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], **fields)


assert MODEL in [model.id for model in client.models.list()]
assert client.models.retrieve(MODEL).id == MODEL
answer = chat("What is 12 + 30?", max_completion_tokens=20, seed=1)
assert answer.choices[0].message.content == "42" and answer.usage.total_tokens > 0, answer
chunks = list(chat("What is 12 + 30?", stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "42"
assert chunks[-1].usage is not None
scored = chat("What is 12 + 30?", logprobs=True, top_logprobs=3)
assert all(len(entry.top_logprobs) == 3 for entry in scored.choices[0].logprobs.content)

messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
call = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
assert json.loads(call.tool_calls[0].function.arguments) == {"city": "Oslo"}, call
messages += [call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": '{"weather": "rain"}'}]
assert client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message.content

prompt = [{"role": "user", "content": "Ada is 30. Answer in JSON."}]
parsed = client.chat.completions.parse(model=MODEL, messages=prompt, response_format=Person).choices[0].message.parsed
assert parsed.age == 30, parsed

completion = client.completions.create(model=MODEL, prompt="One day", echo=True, logprobs=1, max_tokens=1)
assert completion.choices[0].text.startswith("One day")
assert completion.choices[0].logprobs.token_logprobs[0] is None
assert client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2, n=2).choices[3].text is not None
beyond = chat("What is 12 + 30?", extra_body={"top_k": 1, "ignore_eos": True, "min_tokens": 4}, max_tokens=6)
assert beyond.usage.completion_tokens == 6
try:
    chat("x", temperature=9)
except openai.BadRequestError as error:
    assert error.param == "temperature"
else:
    raise AssertionError("a wrong temperature was taken")


async def at_once():
    async with openai.AsyncOpenAI(max_retries=0) as many:
        prompts = [f"What is {number} + 30?" for number in range(10, 18)]
        calls = [
            many.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": prompt}])
            for prompt in prompts
        ]
        return [reply.choices[0].message.content for reply in await asyncio.gather(*calls)]


answers = asyncio.run(at_once())
assert sum(answer == str(number + 30) for number, answer in zip(range(10, 18), answers, strict=True)) >= 6, answers
print("ok")
