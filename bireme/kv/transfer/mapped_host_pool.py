"""Another process's host_pool.py, mapped here: rows are copied out of it by compiled code."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bireme.errors import UnavailableError
from bireme.kv.kernels.copy_kernels import copy_pieces
from bireme.kv.transfer.memory import Region, Rows
from bireme.kv.transfer.wire import SharedMemory, SharedRegion


class MappedHostPool:
    """Another process's pool. Used by the copier's thread."""

    def __init__(self, regions: Sequence[Sequence[Region]], shared: SharedMemory) -> None:
        """`regions`: of this process's own rows; of groups that `shared` lacks none are copied.

        Raises UnavailableError when that memory can't be mapped.
        """
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
