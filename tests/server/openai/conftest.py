"""The server that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.openai_served import Served, served


@pytest.fixture(scope="package")
def chat_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """tiny-chat with its frontend, as tools/serve.py runs them. A test may kill its engine or frontend (both come
    back), and leaves it idle.
    """
    with served("recipes/tiny-chat", tmp_path_factory.mktemp("chat") / "log") as running:
        yield running
