"""openai-agents as it comes, over responses: a tool, a handoff, a typed output, a stream, a conversation kept there."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIConversationsSession,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

set_tracing_disabled(True)
asked = []
SUM, WEATHER = "What is 12 + 30?", "What is the weather in Oslo?"


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city"""
    asked.append(city)
    return '{"weather": "rain"}'


def agent(name="Assistant", **fields):
    settings = ModelSettings(
        max_tokens=100, temperature=0, verbosity="low", tool_choice=fields.pop("tool_choice", None)
    )
    return Agent(name=name, model=os.environ["MODEL"], model_settings=settings, **fields)


async def follow_up():
    first = await Runner.run(agent(), SUM)
    assert first.final_output == "42" and first.last_response_id.startswith("resp_"), first
    later = await Runner.run(agent(), SUM, previous_response_id=first.last_response_id)
    assert later.final_output, later


async def use_a_tool():
    result = await Runner.run(agent(tools=[get_weather]), WEATHER)
    assert asked == ["Oslo"] and result.final_output, (asked, result)
    streamed = Runner.run_streamed(agent(tools=[get_weather]), WEATHER)
    kinds = {event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"}
    assert streamed.final_output and "response.function_call_arguments.delta" in kinds, kinds


async def hand_off():
    handed = await Runner.run(agent("Triage", handoffs=[agent("Sums")], tool_choice="required"), SUM)
    assert handed.last_agent.name == "Sums" and handed.final_output, handed  # tiny-chat has not learned what follows


async def fill_in_a_type():
    typed = await Runner.run(agent(output_type=Person), "Ada is 30. Answer in JSON.")
    assert typed.final_output.age == 30, typed


async def converse():
    """Turns that are kept by the server."""
    session = OpenAIConversationsSession()
    for asked_before in (0, 2):
        assert len(await session.get_items()) == asked_before
        assert (await Runner.run(agent(), SUM, session=session)).final_output
    last = await session.pop_item()
    assert last["role"] == "assistant" and len(await session.get_items()) == 3, last
    await session.clear_session()
    assert await session.get_items() == []


async def converse_by_own_memory():
    session = SQLiteSession("one")
    for question in (SUM, WEATHER):
        assert (await Runner.run(agent(), question, session=session)).final_output
    assert len(await session.get_items()) == 4


async def main():
    for show in (follow_up, use_a_tool, hand_off, fill_in_a_type, converse, converse_by_own_memory):
        await show()
    print("ok")


asyncio.run(main())
