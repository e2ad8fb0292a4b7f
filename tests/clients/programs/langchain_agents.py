"""langchain's create_agent over chat completions, responses and messages: whole, with a tool, and as a stream."""

import os

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

MODEL, URL = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
asked = []


def get_weather(city: str) -> str:
    """Weather of a city"""
    asked.append(city)
    return '{"weather": "rain"}'


def ask(text):
    return {"messages": [{"role": "user", "content": text}]}


own = {"model": MODEL, "max_tokens": 100, "max_retries": 0, "temperature": 0}
models = (
    ChatOpenAI(**own, verbosity="low"),
    ChatOpenAI(**own, use_responses_api=True, verbosity="low"),
    ChatAnthropic(**own, base_url=URL.removesuffix("/v1"), api_key="none"),
)
for model in models:
    assert create_agent(model).invoke(ask("What is 12 + 30?"))["messages"][-1].text == "42", model
    *_, called, told, last = create_agent(model, tools=[get_weather]).invoke(ask("What is the weather in Oslo?"))[
        "messages"
    ]
    assert called.tool_calls[0]["args"] == {"city": "Oslo"} and "rain" in told.text and last.text, (called, told, last)
    tokens = create_agent(model).stream(ask("What is 12 + 30?"), stream_mode="messages")
    assert "".join(str(message.text) for message, _ in tokens) == "42", model
assert asked == ["Oslo"] * len(models)
print("ok")
