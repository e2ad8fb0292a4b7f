"""Real tritonservers for tests, and what transformers says about the same models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import start_server

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def write_recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a recipe folder: model, workers and further keys of recipe.yaml.

    Prompts of tests are short, and go through prefill all the same.
    """

    def write(model: Path, workers: dict[str, Any], **more: Any) -> Path:
        folder = tmp_path_factory.mktemp("recipe")
        tree = {"model": str(model), "workers": workers, "router": {"transfer_ms": 0}, **more}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return folder

    return write


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Any]]:
    """Return `start_server`, whose servers end with the test module."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(start_server(*args, **kwargs))


class Reference:
    """Greedy decoding by plain transformers in fp32; a prompt is computed once."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        eos = self.model.generation_config.eos_token_id
        self.eos_ids = set(eos if isinstance(eos, list) else [eos])
        self._made: dict[tuple[int, ...], list[int]] = {}  # of a prompt: what it was answered at most

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Return the generated ids without the end-of-sequence id."""
        made = self._made.get(tuple(prompt), [])
        if len(made) < max_tokens and not (made and made[-1] in self.eos_ids):
            made = self._made[tuple(prompt)] = self._generate(prompt, max_tokens)
        new = made[:max_tokens]
        return new[:-1] if new and new[-1] in self.eos_ids else new

    def _generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        import torch

        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
        new: list[int] = out[0, len(prompt) :].tolist()
        return new


@pytest.fixture(scope="session")
def reference(sample_model: Callable[[str], Path]) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def get(arch: str) -> Reference:
        if arch not in made:
            made[arch] = Reference(sample_model(arch))
        return made[arch]

    return get
