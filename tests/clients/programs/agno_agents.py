"""agno: an agent over chat completions, responses and messages, whole and streamed."""

import os

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat, OpenAIResponses

MODEL, URL = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
ASK = "What is 12 + 30?"
own = {"id": MODEL, "api_key": "none"}
models = (
    OpenAIChat(**own, base_url=URL),
    OpenAIResponses(**own, base_url=URL),
    Claude(**own, client_params={"base_url": URL.removesuffix("/v1")}, max_tokens=64),
)
for model in models:
    agent = Agent(model=model, telemetry=False)
    assert agent.run(ASK).content == "42", model
    assert "".join(str(event.content or "") for event in agent.run(ASK, stream=True)).startswith("42"), model
print("ok")
