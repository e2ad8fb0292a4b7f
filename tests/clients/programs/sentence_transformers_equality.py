"""The server's embeddings and scores against those that sentence-transformers makes of the same folder."""

import os
from pathlib import Path

import numpy as np
from openai import OpenAI
from sentence_transformers import SentenceTransformer

TEXTS = ["Two banks of oars.", "x = 12", "The quick brown fox jumps over the lazy dog, again and again.", "ναῦς"] * 5
client, model = OpenAI(), os.environ["MODEL"]
folder = Path(__file__).resolve().parents[3] / "models" / "tiny-embedding"
own = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})  # as the server computes


def served(texts, **fields):
    data = client.embeddings.create(model=model, input=texts, **fields).data
    return np.array([one.embedding for one in data])


np.testing.assert_allclose(served(TEXTS), own.encode(TEXTS), atol=1e-5)
np.testing.assert_allclose(served(TEXTS, encoding_format="float"), own.encode(TEXTS), atol=1e-5)
asked = served(TEXTS, extra_body={"prompt_name": "query"})
np.testing.assert_allclose(asked, own.encode(TEXTS, prompt_name="query"), atol=1e-5)
short = own.encode(TEXTS, truncate_dim=32, normalize_embeddings=True)
np.testing.assert_allclose(served(TEXTS, dimensions=32), short, atol=1e-5)
reply = client.post("/score", body={"model": model, "text_1": TEXTS[0], "text_2": TEXTS[1:4]}, cast_to=dict)
scores = own.similarity(own.encode_query(TEXTS[:1]), own.encode_document(TEXTS[1:4])).numpy()[0]
np.testing.assert_allclose([one["score"] for one in reply["data"]], scores, atol=1e-5)
print("ok")
