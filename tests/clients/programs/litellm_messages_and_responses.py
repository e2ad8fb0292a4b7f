"""litellm over messages and responses: as Anthropic's server and as OpenAI's."""

import os

import litellm

MODEL, URL = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
ASK = [{"role": "user", "content": "What is 12 + 30?"}]
claude = {"model": f"anthropic/{MODEL}", "api_base": URL.removesuffix("/v1"), "api_key": "none", "max_tokens": 20}
assert litellm.completion(messages=ASK, **claude).choices[0].message.content == "42"
chunks = litellm.completion(messages=ASK, stream=True, **claude)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "42"
answer = litellm.responses(model=f"openai/{MODEL}", input="What is 12 + 30?", api_base=URL, api_key="none")
assert answer.output_text == "42", answer
print("ok")
