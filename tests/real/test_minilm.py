"""all-MiniLM-L6-v2 by recipes/tiny-embedding against transformers with mean pooling."""

import numpy as np
import openai
import pytest

pytestmark = pytest.mark.real
TEXTS = [
    "A cat sleeps on the sofa.",
    "The kitten is napping on the couch.",
    "Interest rates were raised by the central bank.",
    "naïve café, 東京, 12.5 %",
    "The galley has two banks of oars. " * 25,
]


@pytest.fixture(scope="module")
def own(minilm):
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()

    def embed(text):
        with torch.inference_mode():
            pooled = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        return torch.nn.functional.normalize(pooled, dim=0).numpy()

    return np.array([embed(text) for text in TEXTS])


@pytest.fixture(scope="module")
def embed(embedding_url):
    with openai.OpenAI(base_url=f"{embedding_url}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        yield lambda texts: np.array(
            [one.embedding for one in client.embeddings.create(model=model.id, input=texts).data]
        )


def test_embeddings_are_those_of_transformers_together_and_alone(embed, own):
    np.testing.assert_allclose(embed(TEXTS), own, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([embed([text]) for text in TEXTS]), own, atol=1e-5)


def test_texts_of_one_meaning_are_nearer_than_others(embed):
    cat, kitten, rates = embed(TEXTS[:3])
    assert cat @ kitten > 0.5 > cat @ rates + 0.2
