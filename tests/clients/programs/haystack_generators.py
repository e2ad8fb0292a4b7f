"""haystack: chat generators over chat completions and responses, whole, streamed and with a tool."""

import os

from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


tool = create_tool_from_function(get_weather)
ask = [ChatMessage.from_user("What is 12 + 30?")]
for kind in (OpenAIChatGenerator, OpenAIResponsesChatGenerator):
    generator = kind(model=os.environ["MODEL"], api_base_url=os.environ["OPENAI_BASE_URL"], max_retries=0)
    assert generator.run(ask)["replies"][0].text == "42"
    pieces = []
    generator.run(ask, streaming_callback=lambda chunk, pieces=pieces: pieces.append(chunk.content or ""))
    assert "".join(pieces) == "42", pieces
    weather = [ChatMessage.from_user("What is the weather in Oslo?")]
    (call,) = generator.run(weather, tools=[tool], generation_kwargs={"tool_choice": "required"})["replies"][
        0
    ].tool_calls
    assert call.tool_name == "get_weather", call
print("ok")
