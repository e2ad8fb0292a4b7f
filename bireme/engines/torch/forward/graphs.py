"""What a thread starts on a GPU, recorded as a CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.engines.torch.step import Batch

Pool = tuple[int, int]  # memory that graphs share
_making = threading.Lock()
_LITTLE_BYTES = 1 << 30  # free on a GPU: torch takes memory for a graph from CUDA, not from what it keeps
_MOST_ERROR = 0.02  # of a graph's result against the same kernels launched singly, relative


@dataclass(slots=True)
class StepGraph:
    """A graph of steps of one size."""

    graph: torch.cuda.CUDAGraph
    batch: Batch  # the tensors that it reads


def make_graph(compute: Callable[[], Tensor], pool: Pool | None, vary: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of `compute`, which returns the same tensor each time.

    `vary` changes what it reads, for the comparison with a replay. Raises RuntimeError when they differ, or for what a
    graph can't hold.
    """
    graph, result = record(compute, pool, compute)
    vary()
    compute()
    error = float(error_of(graph, result, result.to(torch.float32, copy=True)))
    if not error <= _MOST_ERROR:
        raise RuntimeError(f"the graph is {error:.3g} off")
    return graph


def record(
    compute: Callable[[], Tensor], pool: Pool | None, warm: Callable[[], Tensor]
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of `compute`, and the tensor that its replays fill, after `warm` has run there.

    That uses all that `compute` does: what is made at a first use must not be made in the graph.
    """
    side, graph = _side_stream(), torch.cuda.CUDAGraph()
    with _making:  # two engines of one process would record on the same stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm()
        torch.cuda.current_stream().wait_stream(side)
        with capture(graph, pool):
            result = compute()
    return graph, result


def error_of(graph: torch.cuda.CUDAGraph, result: Tensor, expected: Tensor) -> Tensor:
    """Replay it and return how far its result is off, relative; one that does nothing is not a number."""
    result.fill_(float("nan"))
    graph.replay()
    return (result.float() - expected).norm() / expected.norm()


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
