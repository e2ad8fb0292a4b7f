"""A started engine has not imported what it never uses, and who needs the compiler gets the real one.

One process shows all of it, in the order of PARTS: each import of torch and transformers takes seconds.
"""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

PREPARE = """
from bireme.engines.torch import kernels
kernels.prepare_compiler()
from triton.runtime import cache
say(cache.triton_key.cache_info().currsize)
"""
LAUNCH = """
import torch
from bireme.engines.torch.kernels import row_wise
before = set(sys.modules)
rows = torch.ones(2, 64, device="cuda")
row_wise.rms_norm(rows, torch.ones(64, device="cuda"), 1e-6)
say(sorted(name for name in set(sys.modules) - before if name.startswith("triton.")))
"""
MAP = """
from bireme.config import EngineConfig
from bireme.engines.registry import prepare
prepare("torch", sys.argv[1], EngineConfig())
from bireme.engines.torch.weights.checkpoint import open_checkpoint
from bireme.engines.torch.weights.shared_weights import make_skeleton
make_skeleton(open_checkpoint(sys.argv[1]), "float32")
say([*sys.modules])
"""
START = """
from bireme.config import EngineConfig, KvCacheConfig
from bireme.engines.base import EngineContext
from bireme.engines.registry import create_engine
from bireme.metrics import Registry
config = EngineConfig(kv_cache_config=KvCacheConfig(max_tokens=1024))
engine = create_engine("torch", EngineContext("decode", "decode", sys.argv[1], config, Registry("decode")))
engine.start(lambda *events: None)
engine.stop()
say([*sys.modules])
"""
MARK = """
from bireme.engines.torch.weights.lean_imports import without_compiler
with without_compiler():
    import torch
    marked = torch.compiler.disable(len)
    say([marked is len, torch._dynamo.config.suppress_errors])
say([torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.disable(len) is len])
"""
SAY = "import json, sys\ndef say(found): print('found', json.dumps(found))\n"
LEFT_OUT = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "scipy"}
HAS_TRITON = importlib.util.find_spec("triton") is not None and importlib.util.find_spec("triton.language") is not None
PARTS = [*([PREPARE] if HAS_TRITON else []), *([LAUNCH] if torch.cuda.is_available() else []), MAP, START, MARK]


@pytest.fixture(scope="module")
def said(tiny):
    """Return what each part has said. A later part's modules include those of the parts before it."""
    command = [sys.executable, "-c", SAY + "".join(PARTS), tiny("llama").path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("found ") for line in done.stdout.splitlines() if line.startswith("found ")]
    return [json.loads(line) for line in lines]


@pytest.fixture(params=[-4, -3], ids=["map", "start"])
def imported(request, said):
    return set(said[request.param])


def test_numba_is_loaded_for_pictures_and_not_for_text_alone(imported):
    pytest.importorskip("numba")
    assert "bireme.engines.torch.loading" in imported and "numba" not in imported


without_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision imports the compiler"
)


@without_torchvision
def test_a_started_engine_has_imported_neither_compiler_nor_distributed_tensors_nor_solvers(imported):
    assert not LEFT_OUT & imported


@without_torchvision
def test_more_than_a_mark_gets_the_real_compiler(said):
    assert said[-2:] == [[True, False], [True, False]]


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: it comes with torch's CUDA builds")
def test_a_prepared_compiler_has_hashed_its_own_files_and_on_a_gpu_imported_what_launches_need(said):
    assert said[:-4] == ([1, []] if torch.cuda.is_available() else [1])
