"""Two generations that serve side by side, started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.generations.shared_generations import SharedGenerations


@pytest.fixture(scope="package")
def generations(
    sample_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedGenerations]:
    launches = SharedGenerations(tmp_path_factory.mktemp("generations"), sample_model("llama"))
    try:
        launches.wait()
        yield launches
    finally:
        launches.end()
