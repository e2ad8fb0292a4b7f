"""Copies of KV rows between a GPU's pools and host memory, for transfers: on a stream of their own.

The rows of all layers are gathered on the GPU and cross in one copy, through page-locked memory that is taken once. The
stream waits for what the engine's had been given when the rows were named, never the other way round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bireme.engines.torch import kernels
from bireme.kv.transfer.chunks import CHUNK_BYTES, STAGED_FACTOR
from bireme.kv.transfer.memory import Bytes, RowCopy, Rows
from bireme.kv.transfer.row_copies import EndedCopy

logger = logging.getLogger("bireme.engines.torch")

_MAX_MOVERS = 64
_NO_DEVICE = 100  # cudaErrorNoDevice
_ALREADY_LOCKED = 712  # cudaErrorHostMemoryAlreadyRegistered: by UCX, when an agent registers it
_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process
MoveRows = Callable[[Rows, Rows], None]  # the rows read, the rows written


class RowCopies:
    """Used by one thread, the transfer's copier, but for `page_lock` and `page_unlock`."""

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], device: torch.device, uses_kernel: bool | None = None
    ) -> None:
        """`groups`: tensors (rows, size) each, in the order of RowMemory.read."""
        self._locked: dict[int, tuple[str, bool]] = {}  # a transfer's memory, by address: kind, whether locked here
        self._counting = threading.Lock()  # two threads of a transfer lock memory
        self._groups = [[tensor.view(torch.uint8) for tensor in tensors] for tensors in groups]
        self._uses_kernel = kernels.is_usable(device) if uses_kernel is None else uses_kernel
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host, kind = staging_memory(CHUNK_BYTES, self._stream is not None)
        self.staging_bytes = {kind: int(self._host.nbytes)}  # by kind, pinned and pageable: a transfer's own as well
        self.on_change: Callable[[], None] = lambda: None  # of that
        self._staged = None  # the device is this
        if self._stream is not None:
            self._staged = torch.empty(STAGED_FACTOR * CHUNK_BYTES, dtype=torch.uint8, device=device)
        self._movers: dict[tuple[int, int, bool], MoveRows] = {}  # their tables of addresses take time to make
        if self._uses_kernel:  # compile it now, not in the first transfer
            for group in range(len(groups)):
                self.read(group, np.zeros(1, np.int64), None)

    def read(self, group: int, rows: Rows, ready: Any) -> memoryview:
        """Return the rows' bytes, tensor by tensor; valid until the next call."""
        host = self._host_room(group, len(rows)).numpy()
        self.begin_read(group, rows, host, ready).wait()
        return memoryview(host)

    def room(self, group: int, num_rows: int) -> memoryview:
        """Return where bytes for `write` lie best; valid until then."""
        return memoryview(self._host_room(group, num_rows).numpy())

    def write(self, group: int, rows: Rows, data: memoryview, ready: Any) -> None:
        """Copy `data`, in the order of `read`, into rows."""
        host, source = self._host_room(group, len(rows)).numpy(), np.frombuffer(data, np.uint8)
        if source.ctypes.data != host.ctypes.data:
            np.copyto(host, source)
        self.begin_write(group, rows, host, ready).wait()

    def begin_read(self, group: int, rows: Rows, target: Bytes, ready: Any) -> RowCopy:
        """Begin to copy the rows' bytes, tensor by tensor."""
        host = torch.from_numpy(target)
        with self._behind(ready):
            staged = self._device_room(host)
            self._move(group, rows, staged, is_read=True)
            if staged is not host:
                host.copy_(staged, non_blocking=True)
            return self._mark()

    def begin_write(self, group: int, rows: Rows, source: Bytes, ready: Any) -> RowCopy:
        """Begin to copy `source`, in the order of `read`, into rows."""
        host = torch.from_numpy(source)
        with self._behind(ready):
            staged = self._device_room(host)
            if staged is not host:
                staged.copy_(host, non_blocking=True)
            self._move(group, rows, staged, is_read=False)
            return self._mark()

    def page_lock(self, memory: Bytes) -> None:
        """Lock memory of a transfer's own in its pages, where that can be done; count it in any case."""
        began, code = time.perf_counter(), self._lock(memory)
        kind = "pinned" if code in (0, _ALREADY_LOCKED) else "pageable"
        with self._counting:
            self._locked[memory.ctypes.data] = kind, code == 0
            self.staging_bytes[kind] = self.staging_bytes.get(kind, 0) + memory.nbytes
        if kind == "pageable":
            reason = f"cudaHostRegister: error {code}"
            logger.warning("staging event=pageable bytes=%d reason=%s: transfers are slower", memory.nbytes, reason)
        else:
            took_ms = 1e3 * (time.perf_counter() - began)
            logger.info("staging event=page_locked bytes=%d took_ms=%.0f", memory.nbytes, took_ms)
        self.on_change()

    def page_unlock(self, memory: Bytes) -> None:
        with self._counting:
            kind, is_own = self._locked.pop(memory.ctypes.data)
            self.staging_bytes[kind] -= memory.nbytes
        if is_own:
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
        self.on_change()

    def _lock(self, memory: Bytes) -> int:
        """Return the error's code; 0: none."""
        if self._stream is None:
            return _NO_DEVICE
        with torch.cuda.device(self._stream.device):
            return int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))

    def _host_room(self, group: int, num_rows: int) -> Tensor:
        """Return host memory for as many rows; more than a chunk has none that is kept."""
        size = num_rows * sum(tensor.shape[1] for tensor in self._groups[group])
        return self._host[:size] if size <= self._host.nbytes else torch.empty(size, dtype=torch.uint8)

    def _device_room(self, host: Tensor) -> Tensor:
        """Return as much memory of the device; what is not kept is the copies' stream's, and so free after them."""
        if self._staged is None:
            return host
        return self._staged[: len(host)] if len(host) <= len(self._staged) else torch.empty_like(host, device="cuda")

    def _move(self, group: int, rows: Rows, staged: Tensor, *, is_read: bool) -> None:
        """Copy rows to or from memory in which they follow each other, tensor by tensor."""
        key = group, len(rows), is_read
        mover = self._movers.get(key)
        if mover is None:
            sides = self._groups[group], self._parts(group, staged)
            mover = row_mover(*(sides if is_read else sides[::-1]), self._uses_kernel)
            if self._staged is not None and len(staged) <= len(self._staged):  # it lies there the next time as well
                if len(self._movers) >= _MAX_MOVERS:
                    del self._movers[next(iter(self._movers))]
                self._movers[key] = mover
        order = np.arange(len(rows))
        mover(*((rows, order) if is_read else (order, rows)))

    def _parts(self, group: int, data: Tensor) -> list[Tensor]:
        """Return each tensor's part of a chunk, (rows, size)."""
        widths = [tensor.shape[1] for tensor in self._groups[group]]
        num_rows = data.numel() // sum(widths)
        return [part.view(num_rows, -1) for part in data.split([num_rows * width for width in widths])]

    def _behind(self, ready: Any) -> AbstractContextManager[Any]:
        """Queue on the copies' stream what follows `ready`."""
        if self._stream is None:
            return nullcontext()
        if ready is not None:
            self._stream.wait_event(ready)
        found: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return found

    def _mark(self) -> RowCopy:
        """Return a sign of all that the copies' stream has been given so far."""
        if self._stream is None:
            return EndedCopy()
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        return _Marked(done)


class _Marked:
    """A place in a stream."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


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
