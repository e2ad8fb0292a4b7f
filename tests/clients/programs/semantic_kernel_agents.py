"""semantic-kernel: its service whole and streamed, a function that it calls by itself, an agent."""

import asyncio
import os

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

asked = []


class Weather:
    @kernel_function
    def get_weather(self, city: str) -> str:
        """Weather of a city"""
        asked.append(city)
        return '{"weather": "rain"}'


def ask(text):
    history = ChatHistory()
    history.add_user_message(text)
    return history


async def main():
    service = OpenAIChatCompletion(ai_model_id=os.environ["MODEL"], async_client=AsyncOpenAI(max_retries=0))
    settings = OpenAIChatPromptExecutionSettings(max_tokens=100, temperature=0)
    answer = await service.get_chat_message_content(ask("What is 12 + 30?"), settings)
    assert str(answer) == "42", answer
    parts = service.get_streaming_chat_message_content(ask("What is 12 + 30?"), settings)
    assert "".join([str(part) async for part in parts]) == "42"
    kernel = Kernel()
    kernel.add_plugin(Weather(), "world")
    # the function is called world-get_weather there, a name that tiny-chat would not take by itself
    settings.function_choice_behavior = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1)
    answer = await service.get_chat_message_content(ask("What is the weather in Oslo?"), settings, kernel=kernel)
    assert len(asked) == 1 and str(answer), (asked, answer)
    agent = ChatCompletionAgent(service=service, name="Assistant")
    assert str(await agent.get_response("What is 12 + 30?")) == "42"
    print("ok")


asyncio.run(main())
