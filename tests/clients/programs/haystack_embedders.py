"""haystack: its embedders of a text and of documents."""

import os

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder

own = {"model": os.environ["MODEL"], "api_base_url": os.environ["OPENAI_BASE_URL"], "max_retries": 0}
TEXTS = ["The dog naps on the hay.", "The captain drops the anchor."]
vector = OpenAITextEmbedder(**own).run(TEXTS[0])["embedding"]
documents = OpenAIDocumentEmbedder(**own, progress_bar=False).run([Document(content=text) for text in TEXTS])[
    "documents"
]
assert [len(document.embedding) for document in documents] == [len(vector)] * 2
assert max(abs(a - b) for a, b in zip(documents[0].embedding, vector, strict=True)) < 1e-5
print("ok")
