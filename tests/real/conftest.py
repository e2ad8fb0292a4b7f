"""Real published models (tools/real_model.py), each served once, and what transformers makes of the same folders.

Where the models can't be fetched the tests are skipped, with pip's reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bireme.gguf.folder import model_folder
from bireme.launch.console import Console
from tests.server.openai_served import five_ports, served
from tools import real_model


class Reference:
    """SmolLM2 in transformers, which reads the GGUF file itself, float32, greedy.

    Its tokenizer is the one that was made of the file: transformers' own does not cut digits apart, as this model's
    does.
    """

    def __init__(self, file: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(file))
        weights = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        self._model: Any = weights.eval()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        made = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(made["input_ids"])

    def text(self, ids: list[int], max_tokens: int) -> str:
        import torch

        prompt = torch.tensor([ids])
        made = self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False
        )
        return str(self.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True))

    def log_probabilities(self, ids: list[int]) -> tuple[list[float], list[float]]:
        """Return for each token after the first: its own, and the best that its place had."""
        import torch

        with torch.inference_mode():
            rows = self._model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), rows.max(-1).values.tolist()


def _fetched(model: Callable[[], Path]) -> Path:
    try:
        return model()
    except real_model.NotFetchedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _fetched(real_model.chat_model)


@pytest.fixture(scope="session")
def minilm() -> Path:
    return _fetched(real_model.embedding_model)


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="session")
def chat_url(smollm2: Path) -> Iterator[str]:
    """The OpenAI API of SmolLM2, prefill and decode apart, as the demo serves it."""
    with real_model.served(smollm2, Console("warning")) as url:
        yield url


@pytest.fixture(scope="session")
def embedding_url(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The OpenAI API of all-MiniLM-L6-v2."""
    log = tmp_path_factory.mktemp("embedding") / "log"
    with served("recipes/tiny-embedding", log, f"--set=model={minilm}", ports=five_ports()) as launch:
        yield launch.url
