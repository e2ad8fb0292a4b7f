"""Rows in memory that other processes of this host map.

The memory is a file without a name in any folder (memfd): no room of /dev/shm is taken, and it ends with the last
process that has it mapped. Others open it by its owner's descriptor, and know it by a name that is drawn once; it can't
shrink, so that a mapping can always be read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bireme.kv.transfer.memory import Bytes2D, HostMemory
from bireme.kv.transfer.wire import SharedMemory, SharedRegion

if TYPE_CHECKING:
    from bireme.kv.transfer.mapped_host_pool import MappedHostPool

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostPool(HostMemory):
    """Zeros at first; a page takes memory when it is touched."""

    def __init__(self, shapes: Sequence[Sequence[tuple[int, int]]]) -> None:
        """`shapes`: (rows, bytes of a row) of each tensor, a group each."""
        self._name = f"bireme-kv-{secrets.token_hex(16)}"
        self._offsets: list[list[int]] = []
        self._num_bytes = 0
        for group in shapes:
            self._offsets.append([self._place(rows * row_bytes) for rows, row_bytes in group])
        self._descriptor = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, self._num_bytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(self._descriptor, self._num_bytes)

        def array_of(offset: int, shape: tuple[int, int]) -> Bytes2D:
            return np.frombuffer(memory, np.uint8, shape[0] * shape[1], offset).reshape(shape)

        super().__init__(
            [
                [array_of(offset, shape) for offset, shape in zip(offsets, group, strict=True)]
                for offsets, group in zip(self._offsets, shapes, strict=True)
            ]
        )

    def shared(self) -> SharedMemory:
        regions = tuple(
            tuple(
                SharedRegion(0, offset, region.row_bytes, region.num_rows)
                for offset, region in zip(offsets, group, strict=True)
            )
            for offsets, group in zip(self._offsets, self.regions, strict=True)
        )
        handle = f"{self._descriptor} {self._name}".encode()
        return SharedMemory(os.getpid(), (handle,), (0,), (self._num_bytes,), regions)

    def map(self, shared: SharedMemory) -> MappedHostPool:
        return mapped_host_pool()(self.regions, shared)

    def _place(self, num_bytes: int) -> int:
        """Return where a tensor begins: on a page."""
        begin = self._num_bytes
        self._num_bytes += max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        return begin


def mapped_host_pool() -> type[MappedHostPool]:
    """Return what maps another process's pool.

    The first call loads numba, 0.6 s of CPU, which engines that map nobody's memory are spared.
    """
    from bireme.kv.transfer.mapped_host_pool import MappedHostPool

    return MappedHostPool
