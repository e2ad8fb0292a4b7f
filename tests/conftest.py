"""Shared by all tests: sample models are made once, property tests repeat."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
os.environ.setdefault("BIREME_OPENAI_PORT", "0")  # launches of tests share the machine; who wants it names a port
if not Path("/dev/nvidiactl").exists():  # Triton's language looks at this when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same code gets the same verdict. `make fuzz` looks for what these examples miss.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("fuzz", derandomize=False, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n`, servers come first: the small tests fill up what is left at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("server") is None)


@pytest.fixture(scope="session")
def sample_model() -> Callable[[str], Path]:
    """Return the folder of a small random model by its architecture: llama, qwen3 or gemma3."""
    from tools.make_sample_model import make

    return lambda arch="llama": make(CHECKOUT / "models" / f"tiny-{arch}", arch)
