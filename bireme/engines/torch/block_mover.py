"""Copies KV blocks between the device's pools, host memory and disk, on threads of its own.

On a GPU host memory is page-locked, and each direction has a stream: a copy waits for what the engine's stream had been
given before it, never the other way round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bireme.engines.torch.kv_store import KvStore
from bireme.errors import ConfigError
from bireme.kv.block_tiers import BlockCopy, CopyResult
from bireme.kv.disk_blocks import DiskBlocks
from bireme.kv.events import DISK
from bireme.kv.transfer.copier import Copier

logger = logging.getLogger("bireme.engines.torch")

_CHUNK_BYTES = 32 << 20  # copied at a time; between two, other requests have their turn
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
        self._views = [store.block_views(group) for group in range(len(store.groups))]
        self._words = [[int(view.shape[1]) for view in views] for views in self._views]
        self._block_bytes = [sum(view[0].nbytes for view in views) for views in self._views]
        self._disk = disk
        self._cuda = store.device if store.device.type == "cuda" else None
        # Slices of arrays cost less than those of tensors, and there are two a layer and block.
        self._arrays = [] if self._cuda else [[view.numpy() for view in views] for views in self._views]
        self._host = [self._host_memory(group, count) for group, count in enumerate(num_host_blocks)]
        self._bounce = [self._host_memory(group, 1) for group in range(len(self._views))] if disk else []
        self._streams: dict[str, Any] = {}
        if self._cuda is not None:
            self._streams = {name: torch.cuda.Stream(self._cuda) for name in ("offload", "onboard")}
        self._is_closing = False
        self._threads = {name: Copier(f"kv-{name}") for name in ("offload", "onboard", "spill")}
        for thread in self._threads.values():
            thread.start()

    def offload(self, copies: list[BlockCopy], done: Done) -> None:
        """Copy down; `done` is called on another thread, for some of them at a time."""
        to_disk = [copy for copy in copies if copy.target_tier == DISK]
        to_host = [copy for copy in copies if copy.target_tier != DISK]
        if to_host:
            self._threads["offload"].submit(self._run(to_host, self._down, done, self._computed()))
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
        move: Callable[[list[BlockCopy], Any], list[CopyResult]],
        done: Done,
        computed: Any,
        handle: OnboardCopies | None = None,
    ) -> Iterator[None]:
        results: list[CopyResult] = []
        for chunk in self._chunks(copies):
            if self._is_closing or (handle is not None and handle.is_cancelled):
                break
            try:
                results += move(chunk, computed)
            except Exception:  # whatever it is, `done` must come
                logger.exception("kv_copy_failed blocks=%d", len(chunk))
                results += [CopyResult.FAILED] * len(chunk)
            yield
        done(copies, results + [CopyResult.CANCELLED] * (len(copies) - len(results)))

    def _chunks(self, copies: list[BlockCopy]) -> Iterator[list[BlockCopy]]:
        """Yield runs of one group and one source."""
        begin, num_bytes = 0, 0
        for at, copy in enumerate(copies):
            first = copies[begin]
            is_other = (copy.group, copy.source_tier) != (first.group, first.source_tier)
            if at > begin and (is_other or num_bytes >= _CHUNK_BYTES or copy.source_tier == DISK):
                yield copies[begin:at]
                begin, num_bytes = at, 0
            num_bytes += self._block_bytes[copy.group]
        yield copies[begin:]

    def _down(self, copies: list[BlockCopy], computed: Any) -> list[CopyResult]:
        group = copies[0].group
        rows = [self._host[group][copy.target - 1] for copy in copies]
        sources = [copy.source for copy in copies]
        if self._cuda is None:
            for source, row in zip(sources, rows, strict=True):
                for place, part in self._parts(group, row.numpy()):
                    part[...] = self._arrays[group][place][source]
            return [CopyResult.DONE] * len(copies)
        with self._on("offload", computed):
            index = torch.tensor(sources, device=self._cuda)
            staged = self._host[group].new_empty((len(copies), self._host[group].shape[1]), device=self._cuda)
            for place, part in self._parts(group, staged):
                part.copy_(self._views[group][place].index_select(0, index))
            for row, block in zip(rows, staged, strict=True):
                row.copy_(block, non_blocking=True)
            self._finish("offload")
        return [CopyResult.DONE] * len(copies)

    def _up(self, copies: list[BlockCopy], computed: Any) -> list[CopyResult]:
        group = copies[0].group
        if copies[0].source_tier == DISK:
            assert self._disk is not None and len(copies) == 1
            rows = [self._bounce[group][0]]
            if not self._disk.read(group, copies[0].source, memoryview(rows[0].numpy()).cast("B")):
                return [CopyResult.FAILED]
        else:
            rows = [self._host[group][copy.source - 1] for copy in copies]
        if self._cuda is None:
            for copy, row in zip(copies, rows, strict=True):
                for place, part in self._parts(group, row.numpy()):
                    self._arrays[group][place][copy.target] = part
            return [CopyResult.DONE] * len(copies)
        with self._on("onboard", computed):
            index = torch.tensor([copy.target for copy in copies], device=self._cuda)
            staged = self._host[group].new_empty((len(copies), self._host[group].shape[1]), device=self._cuda)
            for row, block in zip(rows, staged, strict=True):
                block.copy_(row, non_blocking=True)
            for place, part in self._parts(group, staged):
                self._views[group][place].index_copy_(0, index, part)
            self._finish("onboard")
        return [CopyResult.DONE] * len(copies)

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

    def _parts(self, group: int, data: Any) -> Iterator[tuple[int, Any]]:
        """Yield the place of each layer's keys and values among the views, and their part of `data`.

        `data`: (words of a block) or (blocks, words), a tensor or an array.
        """
        at = 0
        for place, words in enumerate(self._words[group]):
            yield place, data[..., at : at + words]
            at += words

    def _host_memory(self, group: int, num_blocks: int) -> Tensor:
        """Return (blocks, words of a block). Raises ConfigError."""
        shape = num_blocks, sum(self._words[group])
        try:
            return torch.empty(shape, dtype=self._views[group][0].dtype, pin_memory=self._cuda is not None)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"kv_cache_config.host_cache_size: {shape[0] * self._block_bytes[group]} bytes: {reason};"
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

    def _finish(self, name: str) -> None:
        """Wait on this thread, without spinning, for the stream's copies."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._streams[name])
        event.synchronize()
