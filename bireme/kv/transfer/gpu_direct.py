"""Whether network adapters can read a GPU's memory themselves (GPUDirect RDMA): UCX then needs no host memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_ADAPTERS = Path("/sys/class/infiniband")  # InfiniBand, RoCE and EFA
_PEER_MEMORY = (  # modules that let adapters register a GPU's memory
    Path("/sys/module/nvidia_peermem"),
    Path("/sys/module/nv_peer_mem"),
    Path("/sys/kernel/mm/memory_peers/nv_mem"),
)
_RDMA = ("rc", "dc", "ud", "ib", "srd", "all")  # of UCX_TLS


def why_not_direct(device: int) -> str:
    """Return why they can't; an empty text: they can. What UCX says of CUDA does not tell it apart from copies."""
    if not (_ADAPTERS.is_dir() and any(_ADAPTERS.iterdir())):
        return "there is no RDMA adapter here"
    if not _allows_rdma(os.environ.get("UCX_TLS", "")):
        return "UCX_TLS allows no RDMA"
    if not any(path.exists() for path in _PEER_MEMORY) and not _has_dma_buf(device):
        return "the driver lets no adapter read this GPU (neither nvidia_peermem nor DMA-BUF)"
    return ""


def _allows_rdma(transports: str) -> bool:
    """Whether a value of UCX_TLS leaves RDMA in: names, or with a leading ^ those that are left out."""
    names = {name.strip().partition("_")[0] for name in transports.removeprefix("^").split(",")}
    if transports.startswith("^"):
        return "ib" not in names and "rc" not in names
    return not transports or bool(names & set(_RDMA))


def _has_dma_buf(device: int) -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    found = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(found), _DMA_BUF_SUPPORTED, device)
    return code == 0 and bool(found.value)
