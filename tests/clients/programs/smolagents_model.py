"""smolagents: OpenAIModel whole, streamed and with a tool (its agents' own prompt does not fit tiny-chat)."""

import os

from smolagents import OpenAIModel, tool


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


model = OpenAIModel(model_id=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key="none", max_tokens=64)
ask = [{"role": "user", "content": [{"type": "text", "text": "What is 12 + 30?"}]}]
assert model.generate(ask).content == "42"
assert "".join(delta.content or "" for delta in model.generate_stream(ask)) == "42"
ask[0]["content"][0]["text"] = "What is the weather in Oslo?"
(call,) = model.generate(ask, tools_to_call_from=[get_weather]).tool_calls
assert call.function.name == "get_weather", call
print("ok")
