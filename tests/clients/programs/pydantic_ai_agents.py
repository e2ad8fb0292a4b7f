"""pydantic-ai over chats, responses and messages: text, a tool, a stream; over the first two a typed output."""

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider

MODEL, URL = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
asked = []


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """Weather of a city"""
    asked.append(city)
    return '{"weather": "rain"}'


async def main():
    chats, responses = OpenAIChatModel(MODEL), OpenAIResponsesModel(MODEL)  # OPENAI_BASE_URL and OPENAI_API_KEY
    messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL.removesuffix("/v1"), api_key="none"))
    for model in (chats, responses, messages):
        assert (await Agent(model).run("What is 12 + 30?")).output == "42", model
        answer = (await Agent(model, tools=[get_weather]).run("What is the weather in Oslo?")).output
        assert answer and asked.pop() == "Oslo" and not asked, model
        async with Agent(model).run_stream("What is 12 + 30?") as result:
            assert [text async for text in result.stream_text()][-1] == "42", model
    # what pydantic-ai knows of a model says that messages can't: a profile of its own
    for model in (chats, responses):
        person = (await Agent(model, output_type=NativeOutput(Person)).run("Ada is 30. Answer in JSON.")).output
        assert person.age == 30, person
    print("ok")


asyncio.run(main())
