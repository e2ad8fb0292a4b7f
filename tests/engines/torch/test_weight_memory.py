"""Memory for weights that processes share: a sealed memfd, and a GPU's by CUDA's driver or a stand-in of it."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bireme.engines.torch.weights.weight_memory import ExportedMemory, SealedMemory, weight_memory
from bireme.errors import UnavailableError

GPU = torch.device("cuda")
STAND_IN = Path(__file__).with_name("stand_in_driver.c")
has_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class OnHost(ExportedMemory):
    """The stand-in's addresses are the host's."""

    def _tensor(self, address, num_bytes):
        return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    triton = pytest.importorskip("triton")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so"
    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    subprocess.run(["g++", "-x", "c++", "-shared", "-fPIC", f"-I{headers}", STAND_IN, "-o", library], check=True)
    return str(library)


@pytest.fixture(params=["host", "stand-in", pytest.param("gpu", marks=has_gpu)])
def make(request):
    """Return a function that makes the memory of a process."""
    if request.param == "stand-in":
        path = request.getfixturevalue("driver")
        return lambda: OnHost(GPU, path)
    return lambda: weight_memory(GPU if request.param == "gpu" else torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_gpu_to_wait_for(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_what_one_fills_the_other_maps(make):
    one, other = make(), make()
    descriptor, written = one.create(100_000)
    written[70_000:] = 7
    sealed = one.seal(descriptor, written)
    mapped = other.map(descriptor, 100_000)
    assert len(mapped) == len(sealed) == 100_000
    assert mapped[70_000:].eq(7).all() and torch.equal(mapped, sealed)


def test_memory_stays_mapped_when_nobody_has_its_descriptor_any_more(make):
    memory = make()
    descriptor, written = memory.create(5000)
    written[:] = 3
    sealed = memory.seal(descriptor, written)
    os.close(descriptor)
    assert sealed.eq(3).all()


def test_an_open_descriptor_leads_to_what_its_maker_has_unmapped(driver):
    memory = OnHost(GPU, driver)
    descriptor, written = memory.create(5000)
    written[:] = 9
    ctypes.CDLL(None).munmap(ctypes.c_void_p(written.data_ptr()), ctypes.c_size_t(1 << 16))
    assert OnHost(GPU, driver).map(descriptor, 5000).eq(9).all()


def test_a_descriptor_that_is_none_of_the_drivers_is_refused(driver):
    with pytest.raises(UnavailableError, match="cuMemImportFromShareableHandle of CUDA's driver returned"):
        OnHost(GPU, driver).map(9999, 5000)


def test_a_system_without_the_driver_says_so():
    with pytest.raises(UnavailableError, match="no virtual memory management here"):
        ExportedMemory(GPU, "no-such-library.so")


def test_nobody_writes_a_sealed_memfd():
    descriptor, written = SealedMemory().create(5000)
    SealedMemory().seal(descriptor, written)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


def test_less_memory_than_was_told_is_not_mapped():
    descriptor, _ = SealedMemory().create(5000)
    with pytest.raises(UnavailableError, match="has 5000 bytes; 6000 were told"):
        SealedMemory().map(descriptor, 6000)


MAKER = """
import array, os, socket, sys, torch
from bireme.engines.torch.weights.weight_memory import weight_memory
memory = weight_memory(torch.device("cuda"))
torch.zeros(1, device="cuda")
descriptor, written = memory.create(64 << 20)
written[:] = 5
memory.seal(descriptor, written)
link = socket.socket(fileno=int(sys.argv[1]))
link.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
os._exit(0)
"""


@has_gpu
def test_a_gpus_memory_outlives_the_process_that_made_it():
    ours, theirs = socket.socketpair()
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
    _, (descriptor,), _, _ = socket.recv_fds(ours, 10, 1)
    assert maker.wait(60) == 0
    mapped = weight_memory(GPU).map(descriptor, 64 << 20)
    assert mapped.eq(5).all() and re.match("cuda", str(mapped.device))
