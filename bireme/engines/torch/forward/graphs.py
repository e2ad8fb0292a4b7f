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
    side, graph = _warming_stream(), torch.cuda.CUDAGraph()
    with _making:  # two engines of one process would record on the same stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # what is made at a first use must not be made in the graph
                compute()
        torch.cuda.current_stream().wait_stream(side)
        with capture(graph, pool):
            compute()
    vary()
    result = compute()
    expected = result.to(torch.float32, copy=True)
    graph.replay()
    error = float((result.float() - expected).norm() / expected.norm())
    if not error <= _MOST_ERROR:
        raise RuntimeError(f"the graph is {error:.3g} off")
    return graph


@functools.cache
def _warming_stream() -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps tens of MB of workspace for each stream that it has worked on."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Pool | None) -> Iterator[None]:
    """Record in `graph` what this thread starts on the GPU in here.

    No garbage is collected meanwhile, as torch doesn't see to any more: freeing an old graph, event or page-locked
    tensor is a call that CUDA refuses while a stream is captured, and the capture fails with it. After one that fails,
    too, the current stream is the one from before, which torch does not see to.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            yield
    finally:
        if collects:
            gc.enable()
