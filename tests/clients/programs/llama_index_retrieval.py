"""llama-index: embeddings of texts and queries, and a retrieval from an index of them."""

import asyncio
import os

from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

model = OpenAILikeEmbedding(
    model_name=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key="none", max_retries=0
)
TEXTS = ["The dog naps on the hay.", "The captain drops the anchor.", "The ship crosses the sea."]
vectors = model.get_text_embedding_batch(TEXTS)
assert len(vectors) == 3 and len({len(vector) for vector in vectors}) == 1
assert model.similarity(vectors[1], vectors[2]) > model.similarity(vectors[0], vectors[2])
assert asyncio.run(model.aget_query_embedding(TEXTS[0])) == model.get_query_embedding(TEXTS[0])
index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=model)
found = index.as_retriever(similarity_top_k=2).retrieve("The vessel sails over the ocean.")
assert {node.get_content() for node in found} == set(TEXTS[1:]), found
print("ok")
