"""CUDA graphs of decode steps, one for each bucket of batch sizes: a step is one launch instead of thousands.

A graph reads the tensors it was made with; a step's are copied into them, and rows that the batch does not fill
write to the null block. What a graph computes is compared with the same step launched kernel by kernel; a model
whose graphs can't be made, or differ, goes without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bireme.config import CudaGraphConfig
from bireme.engines.torch.forward.graphs import Pool, StepGraph, make_graph
from bireme.engines.torch.step import Batch, DecodeTable, KernelGroup

logger = logging.getLogger("bireme.engines.torch")

_LARGEST = 256  # rows; larger steps spend their time on the GPU, not on launches


class DecodeGraphs:
    """Used by the engine's thread, once made."""

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],
        windows: list[int],
        columns: int,
        sizes: Sequence[int],
        has_grid_positions: bool,
        is_padded: bool = True,
    ) -> None:
        """`columns`: blocks of the longest row. Padded: batches between two sizes are filled up."""
        began = time.monotonic()
        self._compute = compute
        self._windows, self._columns, self._has_grid_positions = windows, columns, has_grid_positions
        self._graphs: dict[int, StepGraph] = {}
        self._sizes, self._is_padded = sizes, is_padded
        self._logits = torch.empty_like(compute(self._batch(self._sizes[-1])))  # of every graph
        pool = None
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            self._graphs[size] = made = self._make(size, pool)
            pool = made.graph.pool()
        logger.info("graphs_made sizes=%s s=%.1f", ",".join(map(str, self._sizes)), time.monotonic() - began)

    def size_for(self, batch: Batch) -> int:
        """Return the size of the graph that holds this step; 0: none does."""
        count = batch.num_decodes
        if not batch.is_decode or count > self._sizes[-1]:
            return 0
        size = next(size for size in self._sizes if size >= count)
        return size if size == count or self._is_padded else 0

    def replay(self, batch: Batch, size: int) -> Tensor:
        count, made = batch.num_decodes, self._graphs[size]
        made.batch.ids[:, :count].copy_(batch.ids, non_blocking=True)
        made.batch.positions[..., :count].copy_(batch.positions, non_blocking=True)
        for own, group in zip(made.batch.groups, batch.groups, strict=True):
            assert isinstance(own, KernelGroup) and isinstance(group, KernelGroup)
            assert own.decode is not None and group.decode is not None
            own.slots[:count].copy_(group.slots, non_blocking=True)
            own.decode.blocks[:count, : group.decode.blocks.shape[1]].copy_(group.decode.blocks, non_blocking=True)
            own.decode.lengths[:count].copy_(group.decode.lengths, non_blocking=True)
            if count < size:
                own.slots[count:].zero_()
                own.decode.blocks[count:, :1].zero_()
                own.decode.lengths[count:].fill_(1)
        made.graph.replay()
        return self._logits[:count]

    def make_next_graph(self) -> bool:
        """All are made."""
        return False

    def _make(self, size: int, pool: Pool | None) -> StepGraph:
        batch = self._batch(size)
        graph = make_graph(partial(self._run, batch), pool, lambda: batch.ids.fill_(7))
        return StepGraph(graph, batch)

    def _run(self, batch: Batch) -> Tensor:
        return self._logits[: batch.ids.shape[1]].copy_(self._compute(batch))

    def _batch(self, size: int) -> Batch:
        """Rows of one token each, in the null block."""
        device = torch.device("cuda")
        ids = torch.zeros(1, size, dtype=torch.int64, device=device)
        positions = torch.zeros(
            (3, 1, size) if self._has_grid_positions else (1, size), dtype=torch.int64, device=device
        )
        groups = [
            KernelGroup(
                torch.zeros(size, dtype=torch.int64, device=device),
                DecodeTable(
                    torch.zeros(size, self._columns, dtype=torch.int32, device=device),
                    torch.ones(size, dtype=torch.int32, device=device),
                ),
                [],
                window,
            )
            for window in self._windows
        ]
        return Batch(ids, positions, torch.arange(size, device=device), groups, [], [])


def graph_sizes(config: CudaGraphConfig | None, max_batch_size: int) -> list[int]:
    """Return the batch sizes of decode steps that get a graph; none: graphs are off."""
    if config is None:
        return []
    if config.batch_sizes is not None:
        return sorted({size for size in config.batch_sizes if size <= max_batch_size})
    return bucket_sizes(min(config.max_batch_size or _LARGEST, max_batch_size))


def verify_sizes(most: int) -> list[int]:
    """Return the numbers of rows of steps with drafts; a step that is filled up costs little beside its launch."""
    sizes = [*range(2, 9, 2), 12, 16, 24, 32, 48, 64, 96, 128, *range(192, most + 1, 64)]
    return sorted({min(size, most) for size in [*sizes, most]})


def bucket_sizes(most: int) -> list[int]:
    """Return the batch sizes that graphs are made for: at most a quarter, or seven rows, are filled up."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, most + 1, 32)]
    return sorted({min(size, most) for size in [*sizes, most]})
