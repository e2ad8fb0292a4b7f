"""Rows in memory that other processes of this host map, and such memory of another process, mapped here.

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
from pathlib import Path
from typing import Any

import numpy as np

from bireme.errors import UnavailableError
from bireme.kv.kernels.copy_kernels import copy_pieces
from bireme.kv.transfer.memory import Bytes2D, HostMemory, Region, Rows
from bireme.kv.transfer.wire import SharedMemory, SharedRegion

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
        return MappedHostPool(self.regions, shared)

    def _place(self, num_bytes: int) -> int:
        """Return where a tensor begins: on a page."""
        begin = self._num_bytes
        self._num_bytes += max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        return begin


class MappedHostPool:
    """Another process's pool. Used by the copier's thread."""

    def __init__(self, regions: Sequence[Sequence[Region]], shared: SharedMemory) -> None:
        """`regions`: of this process's own rows. Raises UnavailableError when that memory can't be mapped."""
        self._targets = [_places([one.address for one in group], group) for group in regions]
        self._memory: Any = _map(shared)
        begin = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._sources = [_places([begin + one.offset for one in group], group) for group in shared.regions]

    def copy(self, group: int, source: Rows, target: Rows, ready: Any) -> None:
        if self._memory is None:
            raise UnavailableError("the process whose memory this was is gone; prefill again")
        is_new = (np.diff(source) != 1) | (np.diff(target) != 1)
        begins = np.concatenate(([0], np.flatnonzero(is_new) + 1))
        counts = np.diff(np.append(begins, len(source)))
        (to, widths), (at, _) = self._targets[group], self._sources[group]
        pieces = np.stack(
            [to + target[begins] * widths, at + source[begins] * widths, counts * widths], axis=-1
        )  # (tensors, pieces of each, 3)
        copy_pieces(pieces.reshape(-1, 3))

    def wait(self) -> None:
        """A copy has ended when it returns."""

    def close(self) -> None:
        self._memory = None


def _places(addresses: Sequence[int], regions: Sequence[Region] | Sequence[SharedRegion]) -> tuple[Rows, Rows]:
    """Return addresses and bytes of a row of a group's tensors, (tensors, 1) both."""
    widths = [region.row_bytes for region in regions]
    return np.array(addresses, np.int64)[:, None], np.array(widths, np.int64)[:, None]


def _map(shared: SharedMemory) -> mmap.mmap:
    """Map a pool for reading, if it is the one that is meant."""
    try:
        (handle,), (size,) = shared.handles, shared.sizes
        number, name = handle.decode().split()
        path = Path(f"/proc/{shared.pid}/fd/{int(number)}")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (ValueError, OSError) as error:
        raise UnavailableError(f"memory of process {shared.pid} can't be opened: {error}") from error
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{name} (deleted)":
            raise UnavailableError(f"{path} is not the memory that was offered")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise UnavailableError(f"{path} is memory that can shrink")
        if (found := os.fstat(descriptor).st_size) < size:
            raise UnavailableError(f"{path} has {found} bytes; {size} were offered")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    except OSError as error:
        raise UnavailableError(f"{path} can't be mapped: {error}") from error
    finally:
        os.close(descriptor)
