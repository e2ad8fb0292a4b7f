"""Calls of CUDA's driver for other processes' memory: on a stand-in that is compiled against the driver's header."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from bireme.config import CHECKOUT
from bireme.engines.torch.pools.cuda_driver import HANDLE_BYTES, CudaDriver, CudaError

STAND_IN = Path(__file__).with_name("stand_in_ipc.c")
OWNER = """
import ctypes, sys
from bireme.engines.torch.pools.cuda_driver import CudaDriver
driver, library = CudaDriver(0, sys.argv[1]), ctypes.CDLL(sys.argv[1])
library.stand_in_allocation.restype = ctypes.c_void_p
address = library.stand_in_allocation()
ctypes.memmove(address + 100, b"rows of a prompt", 16)
found, size = driver.allocation_of(address + 100)
assert (found, size) == (address, 1 << 16)
print(driver.export_allocation(found).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    triton = pytest.importorskip("triton")
    made = tmp_path_factory.mktemp("driver") / "libcuda.so"
    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    subprocess.run(["g++", "-x", "c++", "-shared", "-fPIC", f"-I{headers}", STAND_IN, "-o", made], check=True)
    return str(made)


def test_an_allocation_of_another_process_is_mapped_read_and_let_go(library):
    driver, code = CudaDriver(0, library), [sys.executable, "-c", OWNER, library]
    with subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=CHECKOUT) as owner:
        handle = bytes.fromhex(owner.stdout.readline().decode())
        assert len(handle) == HANDLE_BYTES
        address = driver.map_allocation(handle)
        assert ctypes.string_at(address + 100, 16) == b"rows of a prompt"
        driver.unmap_allocation(address)
        owner.communicate()
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2: CUDA_ERROR_MAP_FAILED"):
        driver.map_allocation(handle)
    assert ctypes.CDLL(library).stand_in_depth() == 0  # every context that was made current is given back


def test_memory_of_a_host_is_no_allocation_of_a_gpu(library):
    """A pool of an encoder without a GPU: what can't be mapped goes through files."""
    with pytest.raises(CudaError, match="17 bytes are no handle of a GPU's memory"):
        CudaDriver(0, library).map_allocation(b"5 bireme-kv-0a1b2")


def test_a_gpu_that_is_not_there_and_a_missing_driver_are_errors(library):
    with pytest.raises(CudaError, match="cuDeviceGet"):
        CudaDriver(3, library)
    with pytest.raises(CudaError, match="driver can't be loaded"):
        CudaDriver(0, "libnothing.so.1")
