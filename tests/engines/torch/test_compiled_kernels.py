"""Kernels with assembly, products or loops of their own are ones that a GPU can run: the compiler takes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.language", reason="triton is not installed: it comes with torch's CUDA builds")
from tests.engines.torch import compiled_kernels


@pytest.fixture(scope="module")
def refusals(tmp_path_factory, pytestconfig):
    """By family of kernels: what the compiler said, which is nothing where it took them.

    What it has made is kept from run to run by its own key (source of the kernel and what it calls, types, options,
    target, release), and is what the assertions look at: compiling all takes 20 s of CPU.
    """
    folder, cache = tmp_path_factory.mktemp("refusals"), getattr(pytestconfig, "cache", None)
    kept = (tmp_path_factory.mktemp if cache is None else cache.mkdir)("compiled_kernels")  # -p no:cacheprovider
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", compiled_kernels.__name__, str(folder / "refusals")]
    done = subprocess.run(program, env=own | {"TRITON_CACHE_DIR": str(kept)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "refusals").read_text())


@pytest.mark.parametrize("family", [family.__name__ for family in compiled_kernels.FAMILIES])
def test_the_kernels_are_ones_that_a_gpu_can_run(refusals, family):
    assert refusals[family] == ""
