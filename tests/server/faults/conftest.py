"""The servers that all tests of this folder share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bireme.launch import Server
from tests.server.shared_deployments import Start, starting

KINDS = {
    "mocker": "mocker_paced_pair",
    "trtllm": "trtllm_paced_pair",
    "mocker_aggregated": "mocker_paced",
    "trtllm_aggregated": "trtllm_paced",
}


@pytest.hookimpl(tryfirst=True)  # before what is marked is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What heals engines is the same for all: one that takes seconds to load is killed in its pair, and all else is for
    a soak.
    """
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        kind, sig = str(params.get("kind")), params.get("sig", signal.SIGKILL)
        if kind == "trtllm_aggregated" or kind == "trtllm" and sig != signal.SIGKILL:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="package")
def shared(sample_model: Callable[[str], Path], write_recipe: Callable[..., Any]) -> Iterator[Start]:
    with starting(sample_model("llama"), write_recipe) as start:
        yield start


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str, shared: Start) -> Server:
    return shared(KINDS[kind])
