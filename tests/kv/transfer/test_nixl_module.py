"""NIXL's wheel is that of torch's CUDA: UCX of another one takes a GPU's memory for the host's."""

import signal
import subprocess
import sys
import types

import pytest

from bireme.kv.transfer import nixl


@pytest.mark.parametrize(
    ("cuda", "module"),
    [("13.0", "nixl_cu13"), ("12.8", "nixl_cu12"), (None, "nixl_cu12")],
)
def test_of_several_wheels_the_one_of_torch_s_cuda_is_taken(monkeypatch, cuda, module):
    torch = types.SimpleNamespace(version=types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch", torch)
    for name in nixl.MODULES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert nixl._load(between_hosts=True).__name__ == module


def test_the_only_wheel_is_taken_whatever_its_cuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=types.SimpleNamespace(cuda="13.0")))
    for name in nixl.MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "nixl_cu12", types.ModuleType("nixl_cu12"))
    assert nixl._load(between_hosts=True).__name__ == "nixl_cu12"


ENDS_BADLY = """
import ctypes, sys
from bireme.kv.transfer import nixl
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)  # as a library's destructor that crashes
if sys.argv[1] == "with_nixl":
    nixl.exit_without_destructors()
print("said at the end")
sys.exit(3)
"""


@pytest.mark.parametrize(("what", "code"), [("alone", -signal.SIGABRT), ("with_nixl", 3)])
def test_a_process_with_nixl_ends_with_its_own_status_whatever_libraries_do_then(what, code):
    done = subprocess.run([sys.executable, "-c", ENDS_BADLY, what], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "said at the end\n"), done.stderr
