"""Kernels in Triton's language, each beside a function in plain torch that computes the same.

Shapes: T tokens, R rows (one token each), H query heads, N key/value heads, K head size of keys, V of values. Pools
are (pool rows, N * K) and (pool rows, N * V). Importing these modules needs `triton`, which comes with torch's CUDA
builds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util

import torch

from bireme.engines.torch import geometry
from bireme.engines.torch.geometry import NEWEST, Capability

_BEFORE_A_LAUNCH = ("triton.tools.tensor_descriptor", "triton.experimental.gluon.nvidia.hopper")
_KEY_IS_IN = ("triton.runtime.cache", "triton.compiler.compiler")  # the first since Triton 3.5


def is_usable(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def why_no_fp8(device: torch.device) -> str:
    """Return why a device that kernels run on takes no 8-bit floats; empty: it does."""
    return geometry.why_no_fp8(_capability(device))


def why_no_few_bits(algo: str, device: torch.device) -> str:
    """Return why a device that kernels run on does not multiply with weights of this `quant_algo`; empty: it does."""
    return geometry.why_no_few_bits(algo, _capability(device))


def keeps_mxfp4(device: torch.device) -> bool:
    """Return whether kernels multiply with experts of four bits on a device."""
    return is_usable(device) and not geometry.why_no_bfloat16(_capability(device))


def _capability(device: torch.device) -> Capability:
    """Return a GPU's; the interpreter on a CPU does what the newest does."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else NEWEST


def prepare_compiler() -> None:
    """Do what Triton does at a process's first kernel: imports, and a hash of its own files, which names what it keeps.

    Takes 0.5 s and nothing of a GPU. What another version of Triton does not have is left out: that kernel does it.
    """
    for name in _BEFORE_A_LAUNCH:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in _KEY_IS_IN:
        make_key = getattr(importlib.import_module(name), "triton_key", None)
        if make_key is not None:
            make_key()  # kept by Triton
            return
