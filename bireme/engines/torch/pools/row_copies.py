"""Copies of KV rows between a GPU's pools and host memory, for transfers: on a stream of their own.

The rows of all layers are gathered on the GPU and cross in one copy, through page-locked memory that is taken once. The
stream waits for what the engine's had been given when the rows were named, never the other way round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bireme.engines.torch import kernels
from bireme.kv.transfer.chunks import CHUNK_BYTES
from bireme.kv.transfer.memory import Rows

logger = logging.getLogger("bireme.engines.torch")

MoveRows = Callable[[Rows, Rows], None]  # the rows read, the rows written


class RowCopies:
    """Used by one thread, the transfer's copier."""

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], device: torch.device, uses_kernel: bool | None = None
    ) -> None:
        """`groups`: tensors (rows, size) each, in the order of RowMemory.read."""
        self._groups = [[tensor.view(torch.uint8) for tensor in tensors] for tensors in groups]
        self._uses_kernel = kernels.is_usable(device) if uses_kernel is None else uses_kernel
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host, self.kind = staging_memory(CHUNK_BYTES, self._stream is not None)
        self._staged = self._host if self._stream is None else torch.empty_like(self._host, device=device)
        if self._uses_kernel:  # compile it now, not in the first transfer
            for group in range(len(groups)):
                self.read(group, np.zeros(1, np.int64), None)

    @property
    def staging_bytes(self) -> int:
        return int(self._host.nbytes)

    def read(self, group: int, rows: Rows, ready: Any) -> memoryview:
        """Return the rows' bytes, tensor by tensor; valid until the next call."""
        staged, host = self._rooms(group, len(rows))
        with self._after(ready):
            parts = self._parts(group, staged)
            move_rows(self._groups[group], parts, rows, np.arange(len(rows)), self._uses_kernel)
            if staged is not host:
                host.copy_(staged, non_blocking=True)
        return memoryview(host.numpy())

    def room(self, group: int, num_rows: int) -> memoryview:
        """Return where bytes for `write` lie best; valid until then."""
        return memoryview(self._rooms(group, num_rows)[1].numpy())

    def write(self, group: int, rows: Rows, data: memoryview, ready: Any) -> None:
        """Copy `data`, in the order of `read`, into rows."""
        staged, host = self._rooms(group, len(rows))
        source = np.frombuffer(data, np.uint8)
        if source.ctypes.data != host.data_ptr():
            np.copyto(host.numpy(), source)
        with self._after(ready):
            if staged is not host:
                staged.copy_(host, non_blocking=True)
            parts = self._parts(group, staged)
            move_rows(parts, self._groups[group], np.arange(len(rows)), rows, self._uses_kernel)

    def _rooms(self, group: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return memory of the device and of the host for as many rows; more than a chunk has none that is kept."""
        size = num_rows * sum(tensor.shape[1] for tensor in self._groups[group])
        if size <= self._host.nbytes:
            return self._staged[:size], self._host[:size]
        host = torch.empty(size, dtype=torch.uint8)
        return (host if self._stream is None else torch.empty_like(host, device=self._staged.device)), host

    def _parts(self, group: int, data: Tensor) -> list[Tensor]:
        """Return each tensor's part of a chunk, (rows, size)."""
        widths = [tensor.shape[1] for tensor in self._groups[group]]
        num_rows = data.numel() // sum(widths)
        return [part.view(num_rows, -1) for part in data.split([num_rows * width for width in widths])]

    @contextmanager
    def _after(self, ready: Any) -> Iterator[None]:
        """Queue on the copies' stream what follows `ready`; wait for it on this thread, without spinning."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            yield
            done = torch.cuda.Event(blocking=True)
            done.record()
        done.synchronize()


def move_rows(
    sources: Sequence[Tensor], targets: Sequence[Tensor], source_rows: Rows, target_rows: Rows, uses_kernel: bool
) -> None:
    """Copy rows between tensors (rows, size) of one device, pair by pair, on its current stream."""
    row_mover(sources, targets, uses_kernel)(source_rows, target_rows)


def row_mover(sources: Sequence[Tensor], targets: Sequence[Tensor], uses_kernel: bool) -> MoveRows:
    """Return what does so, for tensors that stay where they are."""
    if uses_kernel:
        from bireme.engines.torch.kernels.copy_rows import RowCopier, row_places

        widths = [tensor.shape[1] * tensor.element_size() for tensor in sources]
        return RowCopier(row_places(sources), row_places(targets), widths, sources[0].device).copy

    def move(source_rows: Rows, target_rows: Rows) -> None:
        device = sources[0].device
        index, to = (torch.from_numpy(rows).to(device, non_blocking=True) for rows in (source_rows, target_rows))
        for source, target in zip(sources, targets, strict=True):
            target.index_copy_(0, to, source.index_select(0, index))

    return move


def staging_memory(num_bytes: int, is_cuda: bool) -> tuple[Tensor, str]:
    """Return (num_bytes,) of host memory and what it is: pinned, or pageable where page-locked memory can't be had."""
    if is_cuda:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), "pinned"
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            logger.warning("staging event=pageable bytes=%d reason=%s: transfers are slower", num_bytes, reason)
    return torch.empty(num_bytes, dtype=torch.uint8), "pageable"
