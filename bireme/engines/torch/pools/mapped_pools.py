"""KV pools of other processes of this host, mapped here by CUDA IPC, and rows copied out of them.

One kernel copies the rows of all layers of a group, reading the one pool and writing the other, on a stream that the
engine's never waits for. Between GPUs it reads through NVLink or PCIe, and leaves most SMs to the engine's steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bireme.engines.torch import kernels
from bireme.engines.torch.pools.cuda_driver import CudaDriver, CudaError
from bireme.errors import ConfigError, UnavailableError
from bireme.kv.transfer.memory import Rows
from bireme.kv.transfer.wire import SharedMemory, SharedRegion

logger = logging.getLogger("bireme.engines.torch")


def share_pools(groups: Sequence[Sequence[Tensor]], device: torch.device) -> SharedMemory:
    """Return what others need to map these tensors (rows, size). Raises ConfigError when they can't."""
    if not kernels.is_usable(device):
        raise ConfigError(
            "cache_transceiver_config.backend: CUDA_IPC needs triton, which is not installed; set DEFAULT"
        )
    found: dict[int, tuple[int, int, bytes]] = {}  # an allocation's address: its number, size and handle

    def region_of(tensor: Tensor) -> SharedRegion:
        address, size = driver.allocation_of(tensor.data_ptr())  # torch puts small tensors into one
        if address not in found:
            found[address] = len(found), size, driver.export_allocation(address)
        row_bytes = tensor.shape[1] * tensor.element_size()
        return SharedRegion(found[address][0], tensor.data_ptr() - address, row_bytes, tensor.shape[0])

    try:
        driver = CudaDriver(device.index or 0)
        regions = tuple(tuple(region_of(tensor) for tensor in tensors) for tensors in groups)
    except CudaError as error:
        raise ConfigError(
            f"cache_transceiver_config.backend: CUDA_IPC: this GPU's memory can't be shared: {error}; take"
            " expandable_segments and cudaMallocAsync out of PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF), or set"
            " DEFAULT"
        ) from error
    sizes, handles = tuple(size for _, size, _ in found.values()), tuple(handle for _, _, handle in found.values())
    return SharedMemory(os.getpid(), handles, tuple(found), sizes, regions, _gpu_of(device))


def _gpu_of(device: torch.device) -> str:
    """Return what names this GPU in every process, whatever number it has there."""
    return str(torch.cuda.get_device_properties(device).uuid)


class MappedPools:
    """Another process's pools. Used by the copier's thread."""

    def __init__(self, groups: Sequence[Sequence[Tensor]], device: torch.device, shared: SharedMemory) -> None:
        """`groups`: this process's own tensors; of those that `shared` lacks none are copied.

        Raises UnavailableError when that memory can't be mapped.
        """
        from bireme.engines.torch.kernels.copy_rows import FEW_SMS, WHOLE_GPU, RowCopier, RowPlace, row_places

        self._stream = torch.cuda.Stream(device)
        self._copiers: list[RowCopier] = []  # one a group; empty: closed
        self._addresses: list[int] = []
        self._is_own = shared.pid == os.getpid()  # which CUDA does not map again
        try:
            self._driver = CudaDriver(device.index or 0)
            for handle in () if self._is_own else shared.handles:
                self._addresses.append(self._driver.map_allocation(handle))
        except CudaError as error:
            self.close()
            raise UnavailableError(str(error)) from error
        shape = WHOLE_GPU if shared.gpu == _gpu_of(device) else FEW_SMS
        bases = shared.addresses if self._is_own else self._addresses
        with torch.cuda.stream(self._stream):
            for regions, tensors in zip(shared.regions, groups, strict=False):
                sources = [RowPlace(bases[one.allocation] + one.offset, one.row_bytes) for one in regions]
                targets = row_places(tensors)
                widths = [place.stride for place in targets]
                self._copiers.append(RowCopier(sources, targets, widths, device, shape))

    def copy(self, group: int, source: Rows, target: Rows, ready: Any) -> None:
        if not self._copiers:
            raise UnavailableError("the process whose memory this was is gone; prefill again")
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            self._copiers[group].copy(source, target)

    def wait(self) -> None:
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        done.synchronize()

    def close(self) -> None:
        if self._addresses:
            self.wait()
        self._copiers = []
        while self._addresses:
            try:
                self._driver.unmap_allocation(self._addresses.pop())
            except CudaError as error:
                logger.warning("mapped_pools event=unmap_failed error=%s", error)
