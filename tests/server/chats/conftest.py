"""The servers that all tests of this folder are run against."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.contract import stand_in_workers
from tests.server.openai_served import Served, five_ports, served

ENGINES = ("torch", "trtllm")  # the last on the stand-in of tests/contract
RECIPES = ("recipes/tiny-chat", "recipes/tiny-chat-disagg")
SOAK = (("trtllm", "recipes/tiny-chat"),)
TINY_CHATS = [
    pytest.param(kind, marks=[pytest.mark.soak] if kind in SOAK else []) for kind in itertools.product(ENGINES, RECIPES)
]


@pytest.fixture(scope="package", params=TINY_CHATS, ids="-".join)
def tiny_chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """tiny-chat with its frontend on each engine, aggregated and disaggregated: the tests of all modules run on one
    before the next is started.
    """
    engine, recipe = request.param
    if engine == "trtllm":
        recipe = stand_in_workers.copy_recipe(recipe, tmp_path_factory.mktemp("recipe"))
    with served(recipe, tmp_path_factory.mktemp("chat") / "log", ports=five_ports()) as running:
        yield running
