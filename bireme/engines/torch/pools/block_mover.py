"""Copies KV blocks between the device's pools, host memory and disk, on threads of its own.

On a GPU host memory is page-locked, and each direction has a stream: a copy to the device waits for what the engine's
stream had been given before it, a copy down only for what the engine has noted (`note_computed`). The engine's stream
never waits.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bireme.engines.torch import kernels
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.pools.row_copies import MoveRows, row_mover
from bireme.errors import ConfigError
from bireme.kv.blocks.block_tiers import BlockCopy, CopyResult
from bireme.kv.blocks.disk_blocks import DiskBlocks
from bireme.kv.blocks.events import DISK
from bireme.kv.transfer.copier import Copier

logger = logging.getLogger("bireme.engines.torch")

# Copied at a time; between two, other requests have their turn. On a GPU, starting and ending one costs as much time as
# copying 8 MiB.
_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 64 << 20}
_CLOSE_S = 5.0
Done = Callable[[list[BlockCopy], list[CopyResult]], None]


class OnboardCopies:
    """Copies to the device that are under way: the Fetch of their request."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        """Give up; `done` is still called, after the last write."""
        self.is_cancelled = True


class BlockMover:
    def __init__(self, store: KvStore, num_host_blocks: Sequence[int], disk: DiskBlocks | None = None) -> None:
        """Raises ConfigError when host memory can't be had."""
        self._groups = [_GroupBlocks(store.block_views(group)) for group in range(len(store.groups))]
        self._disk = disk
        self._cuda = store.device if store.device.type == "cuda" else None
        self._chunk_bytes = _CHUNK_BYTES[store.device.type]
        ways = ("offload", "onboard") if self._cuda else ()
        self._staging = {name: _Staging(self._groups, self._chunk_bytes, name == "onboard") for name in ways}
        self._host = [self._host_memory(*each) for each in zip(self._groups, num_host_blocks, strict=True)]
        self._bounce = [self._host_memory(group, 1) for group in self._groups if disk]
        self._streams: dict[str, Any] = {name: torch.cuda.Stream(self._cuda) for name in ways}
        self._noted = self._computed()
        self._is_closing = False
        self._threads = {name: Copier(f"kv-{name}") for name in ("offload", "onboard", "spill")}
        for thread in self._threads.values():
            thread.start()

    def note_computed(self) -> None:
        """Copies down that are begun from now on wait for what the engine's stream has been given so far."""
        self._noted = self._computed()

    def offload(self, copies: list[BlockCopy], done: Done) -> None:
        """Copy down; `done` is called on another thread, for some of them at a time."""
        to_disk = [copy for copy in copies if copy.target_tier == DISK]
        to_host = [copy for copy in copies if copy.target_tier != DISK]
        if to_host:
            self._threads["offload"].submit(self._run(to_host, self._down, done, self._noted))
        if to_disk:
            self._threads["spill"].submit(self._run(to_disk, self._spill, done, None))

    def onboard(self, copies: list[BlockCopy], done: Done) -> OnboardCopies:
        """Copy to the device; `done` is called on another thread, once."""
        handle = OnboardCopies()
        self._threads["onboard"].submit(self._run(copies, self._up, done, self._computed(), handle))
        return handle

    def close(self) -> None:
        """Cut short what is under way and end the threads."""
        self._is_closing = True
        ended = [thread.close(_CLOSE_S) for thread in self._threads.values()]
        if self._disk is not None and all(ended):
            self._disk.close()

    def _run(
        self,
        copies: list[BlockCopy],
        move: Callable[[list[BlockCopy], Any], Any],
        done: Done,
        computed: Any,
        handle: OnboardCopies | None = None,
    ) -> Iterator[None]:
        results: list[CopyResult] = []
        running: tuple[Any, int] | None = None  # on the GPU: the end of the chunk before, and its blocks
        for chunk in self._chunks(copies):
            if self._is_closing or (handle is not None and handle.is_cancelled):
                break
            try:
                found = move(chunk, computed)
            except Exception:  # whatever it is, `done` must come
                logger.exception("kv_copy_failed blocks=%d", len(chunk))
                found = [CopyResult.FAILED] * len(chunk)
            if running is not None:  # the next chunk is in the stream: the GPU has no pause between the two
                results += _ended(*running)
            running = None if isinstance(found, list) else (found, len(chunk))
            results += found if isinstance(found, list) else []
            yield
        if running is not None:
            results += _ended(*running)
        done(copies, results + [CopyResult.CANCELLED] * (len(copies) - len(results)))

    def _chunks(self, copies: list[BlockCopy]) -> Iterator[list[BlockCopy]]:
        """Yield runs of one group and one source."""
        begin, num_bytes = 0, 0
        for at, copy in enumerate(copies):
            first = copies[begin]
            is_other = (copy.group, copy.source_tier) != (first.group, first.source_tier)
            if at > begin and (is_other or num_bytes >= self._chunk_bytes or copy.source_tier == DISK):
                yield copies[begin:at]
                begin, num_bytes = at, 0
            num_bytes += self._groups[copy.group].block_bytes
        yield copies[begin:]

    def _down(self, copies: list[BlockCopy], computed: Any) -> Any:
        """Return the results; on a GPU the event of the end, when they are DONE."""
        group, sources = copies[0].group, [copy.source for copy in copies]
        host, rows = self._host[group], [copy.target - 1 for copy in copies]
        if self._cuda is None:
            for source, row in zip(sources, rows, strict=True):
                for blocks, part in self._groups[group].parts(host[row].numpy()):
                    part[...] = blocks[source]
            return [CopyResult.DONE] * len(copies)
        with self._on("offload", computed):
            staged = self._staging["offload"].gather(group, sources)
            for first, last in _runs(rows):
                host[rows[first] : rows[first] + last - first].copy_(staged[first:last], non_blocking=True)
            return self._end("offload")

    def _up(self, copies: list[BlockCopy], computed: Any) -> Any:
        """As `_down`. The bounce buffer of a disk is one: a copy from there is waited for."""
        group, targets = copies[0].group, [copy.target for copy in copies]
        host, rows = self._host[group], [copy.source - 1 for copy in copies]
        if copies[0].source_tier == DISK:
            assert self._disk is not None and len(copies) == 1
            host, rows = self._bounce[group], [0]
            if not self._disk.read(group, copies[0].source, memoryview(host[0].numpy()).cast("B")):
                return [CopyResult.FAILED]
        if self._cuda is None:
            for target, row in zip(targets, rows, strict=True):
                for blocks, part in self._groups[group].parts(host[row].numpy()):
                    blocks[target] = part
            return [CopyResult.DONE] * len(copies)
        with self._on("onboard", computed):
            staged = self._staging["onboard"].room(group, len(copies))
            for first, last in _runs(rows):
                staged[first:last].copy_(host[rows[first] : rows[first] + last - first], non_blocking=True)
            self._staging["onboard"].scatter(group, targets)
            end = self._end("onboard")
        return _ended(end, 1) if copies[0].source_tier == DISK else end

    def _spill(self, copies: list[BlockCopy], computed: Any) -> list[CopyResult]:
        assert self._disk is not None
        results: list[CopyResult] = []
        for copy in copies:
            data = memoryview(self._host[copy.group][copy.source - 1].numpy()).cast("B")
            is_kept = not self._is_closing and self._disk.write(copy.group, copy.target, data)
            results.append(CopyResult.DONE if is_kept else CopyResult.FAILED)
            if not is_kept:  # the disk is full, or fails: what follows would fail as well
                results += [CopyResult.CANCELLED] * (len(copies) - len(results))
                break
        return results

    def _host_memory(self, group: _GroupBlocks, num_blocks: int) -> Tensor:
        """Return (blocks, words of a block). Raises ConfigError."""
        words, dtype = sum(group.words), group.views[0].dtype
        if self._cuda is None:
            return torch.empty((num_blocks, words), dtype=dtype)
        num_bytes = num_blocks * group.block_bytes
        try:
            return page_locked(num_bytes).view(dtype).view(num_blocks, words)
        except (RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"kv_cache_config.host_cache_size: {num_bytes} bytes: {reason};"
                " ask for less, or raise the limit on locked memory (ulimit -l)"
            ) from error

    def _computed(self) -> Any:
        """Return an event of all that the engine's stream has been given so far."""
        if self._cuda is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._cuda))
        return event

    def _on(self, name: str, computed: Any) -> AbstractContextManager[Any]:
        if self._cuda is None:
            return nullcontext()
        self._streams[name].wait_event(computed)
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._streams[name])
        return stream

    def _end(self, name: str) -> Any:
        """Return an event of all that the stream has been given; waiting for it does not spin."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._streams[name])
        return event


class _GroupBlocks:
    """Blocks of one group's layers."""

    def __init__(self, views: list[Tensor]) -> None:
        self.views = views  # (blocks, words) of each layer's keys and values
        self.words = [int(view.shape[1]) for view in views]
        self.block_bytes = sum(view[0].nbytes for view in views)
        # Slices of arrays cost less than those of tensors, and there are two a layer and block.
        self._arrays = [view.numpy() for view in views] if views[0].device.type == "cpu" else []

    def parts(self, block: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the blocks of each layer's keys and values on a CPU, and their part of `block` (words,)."""
        at = 0
        for blocks, words in zip(self._arrays, self.words, strict=True):
            yield blocks, block[at : at + words]
            at += words


class _Staging:
    """Where the blocks of a way pass through on the GPU, a chunk at a time; used in one stream's order.

    The addresses are told to the kernel once: to make them anew for a chunk took longer than to copy it.
    """

    def __init__(self, groups: Sequence[_GroupBlocks], chunk_bytes: int, is_up: bool) -> None:
        sizes = [group.block_bytes for group in groups]
        counts = [max(1, -(-chunk_bytes // size)) for size in sizes]
        device = groups[0].views[0].device
        memory = torch.zeros(max(map(mul, counts, sizes)), dtype=torch.uint8, device=device)
        self._rooms: list[Tensor] = []
        self._moves: list[MoveRows] = []
        for group, count, size in zip(groups, counts, sizes, strict=True):
            views = group.views
            room = memory[: count * size].view(views[0].dtype).view(count, -1)
            parts = list(room.split(group.words, 1))
            sources, targets = (parts, views) if is_up else (views, parts)
            move = row_mover(sources, targets, kernels.is_usable(device))
            move(np.zeros(1, np.int64), np.zeros(1, np.int64))  # compile it now; the null block keeps its zeros
            self._rooms.append(room)
            self._moves.append(move)

    def room(self, group: int, count: int) -> Tensor:
        """Return (count, words): where blocks for `scatter` belong."""
        return self._rooms[group][:count]

    def gather(self, group: int, blocks: Sequence[int]) -> Tensor:
        """Return (blocks, words)."""
        self._moves[group](np.array(blocks), np.arange(len(blocks)))
        return self.room(group, len(blocks))

    def scatter(self, group: int, blocks: Sequence[int]) -> None:
        self._moves[group](np.arange(len(blocks)), np.array(blocks))


def _ended(end: Any, num_blocks: int) -> list[CopyResult]:
    """Wait for copies on a GPU."""
    try:
        end.synchronize()
    except RuntimeError:
        logger.exception("kv_copy_failed blocks=%d", num_blocks)
        return [CopyResult.FAILED] * num_blocks
    return [CopyResult.DONE] * num_blocks


def page_locked(num_bytes: int) -> Tensor:
    """Return (num_bytes,) of host memory, uint8. Raises RuntimeError or OSError.

    torch's own pinned memory is rounded up to a power of two, which is up to half of it for nothing.
    """
    memory, cudart = mmap.mmap(-1, num_bytes), torch.cuda.cudart()
    with suppress(OSError):  # a system that knows none
        memory.madvise(mmap.MADV_HUGEPAGE)  # sooner locked
    found = torch.frombuffer(memory, dtype=torch.uint8)
    torch.cuda.check_error(cudart.cudaHostRegister(found.data_ptr(), num_bytes, 0))
    weakref.finalize(memory, cudart.cudaHostUnregister, found.data_ptr()).atexit = False
    return found


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the index ranges in which each number follows the one before: they are copied at once."""
    first = 0
    for last in range(1, len(numbers) + 1):
        if last == len(numbers) or numbers[last] != numbers[last - 1] + 1:
            yield first, last
            first = last
