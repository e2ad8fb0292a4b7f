"""Shared by all tests: the programs in tools/ can be imported, and the sample models are made once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "tools"))
os.environ.setdefault("BIREME_OPENAI_PORT", "0")  # launches of tests share the machine; who wants it names a port
# pytest puts this folder on the path, and tests/triton would then pass for the package `triton`: torch asks for it.
sys.path[:] = [entry for entry in sys.path if entry != str(CHECKOUT / "tests")]


@pytest.fixture(scope="session")
def sample_model() -> Callable[[str], Path]:
    """Return the folder of a small random model by its architecture: llama, qwen3 or gemma3."""
    from make_sample_model import make

    return lambda arch="llama": make(CHECKOUT / "models" / f"tiny-{arch}", arch)
