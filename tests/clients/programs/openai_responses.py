"""The official package's responses: whole, streamed, parse(), a tool loop, kept ones, the background, async."""

import asyncio
import json
import os
import time

import openai
import pydantic

MODEL = os.environ["MODEL"]
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
client = openai.OpenAI(max_retries=0)
SUM, WEATHER = "What is 12 + 30?", "What is the weather in Oslo?"


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


answer = client.responses.create(model=MODEL, input=SUM, max_output_tokens=20, temperature=0)
assert (answer.output_text, answer.status) == ("42", "completed") and answer.usage.total_tokens > 0, answer
with client.responses.stream(model=MODEL, input=SUM, reasoning={"effort": "medium"}) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_response()
assert final.output_text == "42" and final.output[0].type == "reasoning", final
assert {"response.created", "response.reasoning_text.delta", "response.output_text.delta"} <= kinds, kinds
events = list(client.responses.create(model=MODEL, input=SUM, stream=True, include=["message.output_text.logprobs"]))
assert events[-1].response.output[0].content[0].logprobs, events[-1]
parsed = client.responses.parse(model=MODEL, input="Ada is 30. Answer in JSON.", text_format=Person).output_parsed
assert parsed.age == 30, parsed

items = [{"role": "user", "content": WEATHER}]
called = client.responses.create(model=MODEL, input=items, tools=[TOOL])
(call,) = [item for item in called.output if item.type == "function_call"]
assert json.loads(call.arguments) == {"city": "Oslo"}, call
result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "rain"}'}
whole = client.responses.create(model=MODEL, input=[*items, *called.output, result], tools=[TOOL], temperature=0)
kept = client.responses.create(model=MODEL, input=[result], previous_response_id=called.id, tools=[TOOL], temperature=0)
assert whole.output_text and whole.output_text == kept.output_text, (whole, kept)
assert client.responses.retrieve(kept.id).output_text == kept.output_text
listed = list(client.responses.input_items.list(kept.id, limit=2, order="asc"))
assert [item.type for item in listed] == ["message", "function_call", "function_call_output"], listed
client.responses.delete(kept.id)
try:
    client.responses.retrieve(kept.id)
    raise AssertionError("a deleted response is there")
except openai.NotFoundError:
    pass

later = client.responses.create(model=MODEL, input=SUM, background=True)
while later.status in ("queued", "in_progress"):
    time.sleep(0.1)
    later = client.responses.retrieve(later.id)
assert later.output_text == "42", later
assert client.responses.cancel(later.id).status == "completed"


async def at_once():
    both = openai.AsyncOpenAI(max_retries=0).responses
    answers = await asyncio.gather(*(both.create(model=MODEL, input=SUM, store=False) for _ in range(2)))
    assert [one.output_text for one in answers] == ["42", "42"]


asyncio.run(at_once())
print("ok")
