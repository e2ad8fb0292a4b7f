"""pydantic-ai: text, a typed output as a tool and as a schema, a tool, a stream."""

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel

model = OpenAIChatModel(os.environ["MODEL"])  # address and key: OPENAI_BASE_URL, OPENAI_API_KEY
asked = []


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """Weather of a city"""
    asked.append(city)
    return '{"weather": "rain"}'


async def main():
    assert (await Agent(model).run("What is 12 + 30?")).output == "42"
    person = (await Agent(model, output_type=NativeOutput(Person)).run("Ada is 30. Answer in JSON.")).output
    assert person.age == 30, person
    answer = (await Agent(model, tools=[get_weather]).run("What is the weather in Oslo?")).output
    assert asked == ["Oslo"] and answer
    async with Agent(model).run_stream("What is 12 + 30?") as result:
        assert [text async for text in result.stream_text()][-1] == "42"
    print("ok")


asyncio.run(main())
