"""openai-agents over chat completions: an agent with a tool, whole and streamed."""

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
asked = []


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city"""
    asked.append(city)
    return '{"weather": "rain"}'


def agent(**fields):
    model = OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=AsyncOpenAI(max_retries=0))
    return Agent(name="Assistant", model=model, model_settings=ModelSettings(max_tokens=100, verbosity="low"), **fields)


async def main():
    assert (await Runner.run(agent(), "What is 12 + 30?")).final_output == "42"
    result = await Runner.run(agent(tools=[get_weather]), "What is the weather in Oslo?")
    assert asked == ["Oslo"] and result.final_output, (asked, result)
    streamed = Runner.run_streamed(agent(), "What is 12 + 30?")
    events = [event.type async for event in streamed.stream_events()]
    assert streamed.final_output == "42" and "raw_response_event" in events
    print("ok")


asyncio.run(main())
