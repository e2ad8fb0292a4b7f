"""strands: an agent over chat completions and over messages."""

import os

from strands import Agent
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel

MODEL, URL = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
for model in (
    OpenAIModel(client_args={"api_key": "none", "base_url": URL}, model_id=MODEL),
    AnthropicModel(client_args={"api_key": "none", "base_url": URL.removesuffix("/v1")}, model_id=MODEL, max_tokens=64),
):
    result = Agent(model=model, callback_handler=None)("What is 12 + 30?")
    assert str(result).strip() == "42", result
print("ok")
