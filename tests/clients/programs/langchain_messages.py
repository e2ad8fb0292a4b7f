"""langchain-anthropic: ChatAnthropic whole, streamed, with tools, and what it counts."""

import os

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
chat = ChatAnthropic(model=os.environ["MODEL"], base_url=URL, api_key="none", max_tokens=64, max_retries=0)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


assert chat.invoke("What is 12 + 30?").content == "42"
assert "".join(str(chunk.text) for chunk in chat.stream("What is 12 + 30?")) == "42"
(call,) = chat.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Oslo?").tool_calls
assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str), call
assert chat.get_num_tokens_from_messages([HumanMessage("What is 12 + 30?")]) > 5
print("ok")
