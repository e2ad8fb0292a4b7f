"""litellm: as OpenAI's server and as vLLM's, with vLLM's sampling fields; streams, tools, text completions, async."""

import asyncio
import os

import litellm

URL, MODEL = os.environ["OPENAI_BASE_URL"], os.environ["MODEL"]
ASK = [{"role": "user", "content": "What is 12 + 30?"}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
for provider in ("openai", "hosted_vllm"):
    fields = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 20, "num_retries": 0}
    answer = litellm.completion(messages=ASK, **fields)
    assert answer.choices[0].message.content == "42", answer
    chunks = litellm.completion(messages=ASK, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "42"
    more = {"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "min_tokens": 3}
    answer = litellm.completion(messages=ASK, **more, **fields)
    assert answer.usage.completion_tokens == 20, answer
    answer = litellm.completion(messages=ASK, guided_choice=["yes", "no"], **fields)
    assert answer.choices[0].message.content in ("yes", "no"), answer
    assert asyncio.run(litellm.acompletion(messages=ASK, **fields)).choices[0].message.content == "42"
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="One day", api_base=URL, api_key="none", max_tokens=5
)
assert text.choices[0].text
print("ok")
