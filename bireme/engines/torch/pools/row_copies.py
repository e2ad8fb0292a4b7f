"""Copies of KV rows between a GPU's pools and host memory, for transfers: on a stream of their own.

The rows of all layers are gathered on the GPU and cross in one copy, through page-locked memory that is taken once. The
stream waits for what the engine's had been given when the rows were named, never the other way round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bireme.engines.torch import kernels
from bireme.kv.transfer.chunks import CHUNK_BYTES
from bireme.kv.transfer.memory import Bytes, RowCopy, Rows
from bireme.kv.transfer.row_copies import EndedCopy

logger = logging.getLogger("bireme.engines.torch")

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process
MoveRows = Callable[[Rows, Rows], None]  # the rows read, the rows written


class RowCopies:
    """Used by one thread, the transfer's copier, but for `page_lock` and `page_unlock`."""

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], device: torch.device, uses_kernel: bool | None = None
    ) -> None:
        """`groups`: tensors (rows, size) each, in the order of RowMemory.read."""
        self._locked: dict[int, str] = {}  # a transfer's own memory, by address: its kind
        self._counting = threading.Lock()  # two threads of a transfer lock memory
        self._groups = [[tensor.view(torch.uint8) for tensor in tensors] for tensors in groups]
        self._uses_kernel = kernels.is_usable(device) if uses_kernel is None else uses_kernel
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host, kind = staging_memory(CHUNK_BYTES, self._stream is not None)
        self.staging_bytes = {kind: int(self._host.nbytes)}  # by kind, pinned and pageable: a transfer's own as well
        self.on_change: Callable[[], None] = lambda: None  # of that
        self._staged = self._host if self._stream is None else torch.empty_like(self._host, device=device)
        if self._uses_kernel:  # compile it now, not in the first transfer
            for group in range(len(groups)):
                self.read(group, np.zeros(1, np.int64), None)

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

    def begin_read(self, group: int, rows: Rows, target: Bytes, ready: Any) -> RowCopy:
        """Begin to copy the rows' bytes, tensor by tensor."""
        staged, host = self._rooms(group, len(rows))[0], torch.from_numpy(target)
        with self._behind(ready):
            move_rows(self._groups[group], self._parts(group, staged), rows, np.arange(len(rows)), self._uses_kernel)
            host.copy_(staged, non_blocking=True)
            return self._mark()

    def begin_write(self, group: int, rows: Rows, source: Bytes, ready: Any) -> RowCopy:
        """Begin to copy `source`, in the order of `read`, into rows."""
        staged, host = self._rooms(group, len(rows))[0], torch.from_numpy(source)
        with self._behind(ready):
            staged.copy_(host, non_blocking=True)
            move_rows(self._parts(group, staged), self._groups[group], np.arange(len(rows)), rows, self._uses_kernel)
            return self._mark()

    def page_lock(self, memory: Bytes) -> None:
        """Lock memory of a transfer's own in its pages, where that can be done; count it in any case."""
        began, error = time.perf_counter(), self._lock(memory)
        kind = "pageable" if error else "pinned"
        with self._counting:
            self._locked[memory.ctypes.data] = kind
            self.staging_bytes[kind] = self.staging_bytes.get(kind, 0) + memory.nbytes
        if error:
            logger.warning("staging event=pageable bytes=%d reason=%s: transfers are slower", memory.nbytes, error)
        else:
            took_ms = 1e3 * (time.perf_counter() - began)
            logger.info("staging event=page_locked bytes=%d took_ms=%.0f", memory.nbytes, took_ms)
        self.on_change()

    def page_unlock(self, memory: Bytes) -> None:
        with self._counting:
            kind = self._locked.pop(memory.ctypes.data)
            self.staging_bytes[kind] -= memory.nbytes
        if kind == "pinned":
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
        self.on_change()

    def _lock(self, memory: Bytes) -> str:
        """Return why it could not be done, or an empty text."""
        if self._stream is None:
            return "there is no GPU"
        with torch.cuda.device(self._stream.device):
            code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
        return "" if int(code) == 0 else f"cudaHostRegister: {code}"

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

    @contextmanager
    def _after(self, ready: Any) -> Iterator[None]:
        """Queue on the copies' stream what follows `ready`; wait for it on this thread, without spinning."""
        with self._behind(ready):
            yield
            done = self._mark()
        done.wait()


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
