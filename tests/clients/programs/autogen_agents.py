"""autogen: an agent over chat completions, with a tool, and its client whole and streamed."""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

SUM = UserMessage(content="What is 12 + 30?", source="user")
ABILITIES = {
    "family": "unknown", "function_calling": True, "json_output": True, "structured_output": True, "vision": False,
}  # fmt: skip
asked = []


async def get_weather(city: str) -> str:
    """Weather of a city"""
    asked.append(city)
    return '{"weather": "rain"}'


async def main():
    client = OpenAIChatCompletionClient(
        model=os.environ["MODEL"], base_url=os.environ["OPENAI_BASE_URL"], api_key="none", model_info=ABILITIES,
        max_retries=0,
    )  # fmt: skip
    answer = await client.create([SUM])
    assert answer.content == "42" and answer.finish_reason == "stop" and answer.usage.completion_tokens > 0, answer
    *parts, last = [part async for part in client.create_stream([SUM])]
    assert "".join(parts) == last.content == "42", (parts, last)
    agent = AssistantAgent("assistant", client, tools=[get_weather], system_message=None)
    result = await agent.run(task="What is the weather in Oslo?")
    assert asked == ["Oslo"] and "rain" in result.messages[-1].content, result
    await client.close()
    print("ok")


asyncio.run(main())
