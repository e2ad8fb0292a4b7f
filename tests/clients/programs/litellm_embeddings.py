"""litellm: a rerank as vLLM's server, whose address has no /v1, and embeddings."""

import os

import litellm

MODEL, URL = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
TEXTS = ["The cat sleeps.", "Two banks of oars.", "It rains today."]
asked = {"query": TEXTS[1], "documents": TEXTS, "top_n": 2, "api_key": "none"}
for base in (URL.removesuffix("/v1"), URL):
    best, second = litellm.rerank(model=f"hosted_vllm/{MODEL}", api_base=base, **asked).results
    assert best["index"] == 1 and best["relevance_score"] > second["relevance_score"], (best, second)
for provider in ("openai", "hosted_vllm"):
    made = litellm.embedding(model=f"{provider}/{MODEL}", input=TEXTS, api_base=URL, api_key="none")
    assert len(made.data) == 3 and made.usage.prompt_tokens > 0, made
print("ok")
