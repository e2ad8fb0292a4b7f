"""cohere: the client's own rerank, in both of its versions of the path."""

import os

import cohere

DOCUMENTS = ["The cat sleeps.", "Two banks of oars.", "It rains today."]
URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
asked = {"model": os.environ["MODEL"], "query": "Two banks of oars.", "documents": DOCUMENTS, "top_n": 2}
for client in (cohere.ClientV2(api_key="none", base_url=URL), cohere.Client(api_key="none", base_url=URL)):
    best, second = client.rerank(**asked).results
    assert best.index == 1 and best.relevance_score > second.relevance_score, (best, second)
print("ok")
