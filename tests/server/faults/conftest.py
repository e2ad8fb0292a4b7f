"""The servers that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.shared_deployments import Start, starting


@pytest.fixture(scope="package")
def shared(sample_model: Callable[[str], Path], write_recipe: Callable[..., Any]) -> Iterator[Start]:
    with starting(sample_model("llama"), write_recipe) as start:
        yield start
