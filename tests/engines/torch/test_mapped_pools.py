"""Pools of another process, mapped by CUDA IPC."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from bireme.config import CHECKOUT
from bireme.engines.torch.pools.mapped_pools import share_pools
from bireme.errors import ConfigError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OWNER = """
import sys, msgspec, torch
from bireme.engines.torch.pools.mapped_pools import share_pools
device = torch.device("cuda", 0)
tensors = [torch.full((1 << 16, size), 7, dtype=torch.uint8, device=device) for size in (2048, 1024, 16)]
torch.cuda.synchronize()
sys.stdout.buffer.write(msgspec.msgpack.encode(share_pools([tensors], device)).hex().encode() + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""
READER = """
import sys, msgspec, subprocess, torch, numpy as np
from bireme.engines.torch.pools.mapped_pools import MappedPools
from bireme.kv.transfer.wire import SharedMemory
device = torch.device("cuda", 0)
owner = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
shared = msgspec.msgpack.decode(bytes.fromhex(owner.stdout.readline().decode()), type=SharedMemory)
mine = [torch.zeros((1 << 16, size), dtype=torch.uint8, device=device) for size in (2048, 1024, 16)]
mapped = MappedPools([mine], device, shared)
rows = np.random.default_rng(0).permutation(1 << 16)[:50_000]
mapped.copy(0, rows, rows[::-1].copy(), None)
mapped.wait()
assert all(int((tensor == 7).all(1).sum()) == len(rows) for tensor in mine), "wrong rows"
for _ in range(200):
    mapped.copy(0, rows, rows, None)
owner.kill()
for _ in range(200):
    mapped.copy(0, rows, rows, None)
owner.wait()
mapped.copy(0, rows, rows, None)
mapped.close()
assert int(torch.ones(4, device=device).sum()) == 4
print("usable")
"""


@needs_gpu
def test_a_gpu_stays_usable_when_the_owner_of_mapped_memory_dies_in_the_midst_of_copies():
    found = subprocess.run(
        [sys.executable, "-c", READER, OWNER],
        capture_output=True, text=True, timeout=120, cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    assert found.stdout.endswith("usable\n"), found.stderr


@needs_gpu
def test_memory_without_handles_is_refused_with_the_key_and_the_remedy():
    code = (
        "import torch; from bireme.engines.torch.pools.mapped_pools import share_pools; d = torch.device('cuda', 0);"
        "share_pools([[torch.zeros(1 << 20, 64, device=d)]], d)"
    )
    settings = {"PYTHONPATH": str(CHECKOUT), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | settings
    )
    assert "cache_transceiver_config.backend: CUDA_IPC" in found.stderr and "expandable_segments" in found.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is a GPU")
def test_a_device_without_cuda_is_refused_with_the_key():
    with pytest.raises(ConfigError, match="cache_transceiver_config.backend: CUDA_IPC"):
        share_pools([[torch.zeros(4, 4)]], torch.device("cpu"))
