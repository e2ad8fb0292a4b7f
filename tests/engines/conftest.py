"""Real engine processes on the mocker."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bireme.config import Recipe
from bireme.engines.stub.client import EngineClient
from bireme.metrics import Registry
from tests.engines.engine_fixtures import recipe_in


@pytest.fixture
def make_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Return a maker of mocker recipes; keyword arguments go to `mocker`, `engine` and `top` to their places."""
    return functools.partial(recipe_in, tmp_path)


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
