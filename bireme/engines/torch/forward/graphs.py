"""What a thread starts on a GPU, recorded as a CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.engines.torch.step import Batch

Pool = tuple[int, int]  # memory that graphs share
_making = threading.Lock()
MOST_MISSES = 32  # steps that lacked a graph, until it is made beside running requests
_LITTLE_BYTES = 1 << 30  # free on a GPU: torch takes memory for a graph from CUDA, not from what it keeps
_MOST_ERROR = 0.02  # of a graph's result against the same kernels launched singly, relative


@dataclass(slots=True)
class StepGraph:
    """A graph of steps of one size."""

    graph: torch.cuda.CUDAGraph
    batch: Batch  # the tensors that it reads


def by_need(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return those that the first requests need, and the others, in the order in which they are made.

    First the largest, into whose memory the others fit, then from the smallest on the next that is twice as large or
    more: until the others are made each stands in for those below it.
    """
    first, reached = list(sizes[-1:]), 0
    for size in sizes[:-1]:
        if size >= 2 * reached:
            first.append(size)
            reached = size
    return first, [size for size in reversed(sizes) if size not in first]


def make_graph(
    compute: Callable[[], Tensor], pool: Pool | None, vary: Callable[[], None] | None = None
) -> torch.cuda.CUDAGraph:
    """Return a graph of `compute`, which returns the same tensor each time, after a comparison with a replay.

    `vary` changes what it reads before that, where it would be the same again. Raises RuntimeError when they differ,
    or for what a graph can't hold.
    """
    side, graph = _side_stream(), torch.cuda.CUDAGraph()
    with _making:  # two engines of one process would record on the same stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = compute()  # what is made at a first use must not be made in the graph
        torch.cuda.current_stream().wait_stream(side)
        with capture(graph, pool):
            compute()
    if vary is not None:
        vary()
        result = compute()
    expected = result.to(torch.float32, copy=True)
    result.fill_(float("nan"))  # a replay that does nothing is off
    graph.replay()
    error = float((result.float() - expected).norm() / expected.norm())
    if not error <= _MOST_ERROR:
        raise RuntimeError(f"the graph is {error:.3g} off")
    return graph


class SizedGraphs:
    """Graphs of steps by their rows, in one memory; used by the engine's thread."""

    def __init__(self, sizes: Sequence[int], make: Callable[[int, Pool | None], torch.cuda.CUDAGraph | None]) -> None:
        """`make`: returns a size's graph, in this memory; None: there can't be one."""
        self.made: dict[int, torch.cuda.CUDAGraph] = {}
        self._make = make
        self._misses: dict[int, int] = {}
        self._first, self._others = by_need(sizes)  # still to be made

    @property
    def to_make(self) -> list[int]:
        return [*self._first, *self._others]

    def make_next(self, only_first: bool = False) -> bool:
        """Make the next one, of an engine that is idle or not ready yet; False: there is none."""
        sizes = self._first or ([] if only_first else self._others)
        if not sizes:
            return False
        self.make(sizes[0])
        return True

    def make(self, size: int) -> None:
        """Make this one, if it is still to be made."""
        for sizes in (self._first, self._others):
            if size in sizes:
                sizes.remove(size)
                other = next(iter(self.made.values()), None)
                if (graph := self._make(size, None if other is None else other.pool())) is not None:
                    self.made[size] = graph

    def holding(self, rows: int, most: int) -> int:
        """Return the smallest size that is made and holds so many rows, `most` or less; 0: there is none."""
        return min((size for size in self.made if rows <= size <= most), default=0)

    def missed(self, size: int) -> None:
        """Note that a step has lacked this one: when many have it is made, and running requests wait for it."""
        self._misses[size] = misses = self._misses.get(size, 0) + 1
        if misses == MOST_MISSES:
            self.make(size)


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps tens of MB of workspace for each stream that it has worked on."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Pool | None) -> Iterator[None]:
    """Record in `graph` what this thread starts on the GPU in here; nothing of it is computed.

    Unlike torch.cuda.graph it does not wait for the GPU, nor gives back the memory that torch keeps: the steps after it
    would have to ask CUDA for theirs anew. Only where little is left the graph is to find that.

    No garbage is collected meanwhile: freeing an old graph, event or page-locked tensor is a call that CUDA refuses
    while a stream is captured, and the capture fails with it.
    """
    if torch.cuda.mem_get_info()[0] < _LITTLE_BYTES:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    collects = gc.isenabled()
    gc.disable()
    side = _side_stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
