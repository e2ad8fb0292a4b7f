"""The TensorRT-LLM engine in this process, on the stand-in: one profile after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract import stand_in_workers
from tests.contract.trtllm_harness import Harness

# What a test that needs the stand-in's own doings has in its source.
HOOKS = ("TRTLLM_STAND_IN", "STEP_MS", "TRANSFER_MS", "_executor", "monkeypatch", "env=", "stand_in_workers.STAND_IN")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a real tensorrt_llm is installed, tests that reach into the stand-in are skipped."""
    if not stand_in_workers.is_real_there():
        return
    for item in items:
        source = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
        if found := next((hook for hook in HOOKS if hook in source), None):
            item.add_marker(pytest.mark.skip(reason=f"about the stand-in ({found}), and tensorrt_llm is installed"))


def skip_of_other_release(profile: str) -> None:
    import tensorrt_llm

    installed = str(tensorrt_llm.__version__)
    if installed.split(".")[:2] != profile.split(".")[:2]:
        pytest.skip(f"about release {profile}, and {installed} is installed")


@pytest.fixture(scope="module", params=stand_in_workers.PROFILES)
def profile(request: pytest.FixtureRequest) -> Iterator[str]:
    """The stand-in as one release, imported anew; tests that need one release name it by `indirect`.

    A real tensorrt_llm, where one is installed, takes its place as the release that it is.
    """
    if stand_in_workers.is_real_there():
        skip_of_other_release(request.param)
        yield request.param
        return
    with stand_in_workers.imported(request.param):
        yield request.param


@pytest.fixture
def make_engine(
    profile: str, sample_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Harness]]:
    """Return a maker of started engines; keyword arguments are the engine YAML's. `context`: of the worker's."""
    made: list[Harness] = []

    def make(
        stage: str = "decode", model: str = "llama", env: dict[str, str] | None = None,
        context: dict[str, Any] | None = None, **yaml: Any,
    ) -> Harness:  # fmt: skip
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        harness = Harness(stage, sample_model(model), yaml, **(context or {}))
        made.append(harness)
        return harness

    yield make
    for harness in made:
        harness.close()
