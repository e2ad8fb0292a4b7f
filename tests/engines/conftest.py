"""Real engine processes on the mocker."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bireme.config import Recipe
from bireme.engines.stub.client import EngineClient
from bireme.metrics import Registry
from bireme.recipe_files import load_recipe
from tests.engines.engine_fixtures import VOCAB_SIZE


@pytest.fixture
def make_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Return a maker of mocker recipes; keyword arguments go to `mocker`, `engine` and `top` to their places."""

    def make(engine: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **mocker: Any) -> Recipe:
        config = {"mocker": {"vocab_size": VOCAB_SIZE, "step_ms": 2} | mocker} | (engine or {})
        workers = {"decode": {"engine": "mocker", "engine_config": config}}
        if (engine or {}).get("cache_transceiver_config"):
            workers["prefill"] = workers["decode"]
        supervisor = {"ping_interval_s": 0.05, "restart_backoff_s": 0.01}
        tree = {"model": "none", "workers": workers, "supervisor": supervisor} | (top or {})
        (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
        return load_recipe(tmp_path, override="")

    return make


@pytest.fixture
def start_client(tmp_path: Path) -> Iterator[Callable[..., EngineClient]]:
    """Return a starter of clients with their engine processes; all are stopped at the end."""
    clients: list[EngineClient] = []
    folder = tmp_path / "run"
    folder.mkdir()

    def start(recipe: Recipe, worker: str = "decode") -> EngineClient:
        client = EngineClient(recipe, worker, Registry(worker), logging.getLogger("test"), run_dir=folder)
        clients.append(client)
        client.start()
        return client

    yield start
    for client in clients:
        client.stop()


@pytest.fixture
def client(make_recipe: Callable[..., Recipe], start_client: Callable[..., EngineClient]) -> EngineClient:
    """Return a client of a mocker at 2 ms a step."""
    return start_client(make_recipe())
