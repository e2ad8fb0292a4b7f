"""langchain-openai's embeddings of documents and of a query: texts are sent, no ids of a foreign vocabulary."""

import os

from langchain_openai import OpenAIEmbeddings

TEXTS = ["The dog naps on the hay.", "The captain drops the anchor."]
model = OpenAIEmbeddings(model=os.environ["MODEL"], check_embedding_ctx_length=False, max_retries=0)
vectors = model.embed_documents(TEXTS)
query = model.embed_query(TEXTS[0])
assert max(abs(a - b) for a, b in zip(vectors[0], query, strict=True)) < 1e-5 and vectors[1] != query
print("ok")
