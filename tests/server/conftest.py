"""Real tritonservers for tests, and what transformers says about the same models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import start_server

CHECKOUT = Path(__file__).resolve().parents[2]

TINY_CHATS = [  # trtllm: on the stand-in of tests/contract
    (engine, recipe) for engine in ("torch", "trtllm") for recipe in ("recipes/tiny-chat", "recipes/tiny-chat-disagg")
]


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


@pytest.fixture(scope="session")
def chat_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """tiny-chat with its frontend, as tools/serve.py runs them: one for all tests of the OpenAI API that can
    share it. A test may kill its engine or frontend (both come back), and leaves it idle.
    """
    from tests.server.openai_served import served

    with served("recipes/tiny-chat", tmp_path_factory.mktemp("chat") / "log") as running:
        yield running


@pytest.fixture(scope="session", params=TINY_CHATS, ids="-".join)
def tiny_chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """tiny-chat with its frontend on each engine, aggregated and disaggregated: the tests of all modules that only
    ask run on one before the next is started.
    """
    from tests.contract import stand_in_workers
    from tests.server.openai_served import five_ports, served

    engine, recipe = request.param
    if engine == "trtllm":
        recipe = stand_in_workers.copy_recipe(recipe, tmp_path_factory.mktemp("recipe"))
    with served(recipe, tmp_path_factory.mktemp("chat") / "log", ports=five_ports()) as running:
        yield running


@pytest.fixture(scope="session")
def shared(sample_model: Callable[[str], Path], write_recipe: Callable[..., Path]) -> Iterator[Callable[[str], Any]]:
    """Return a function: name of a deployment in shared_deployments -> its server, which ends with the session."""
    from bireme.launch import Server
    from tests.server.shared_deployments import recipe_of

    with ExitStack() as stack:

        @functools.cache
        def get(name: str) -> Server:
            return stack.enter_context(start_server(write_recipe(sample_model("llama"), **recipe_of(name))))

        yield get
