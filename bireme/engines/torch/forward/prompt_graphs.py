"""CUDA graphs of passes over one short prompt, or over the few tokens behind a prefix that is there already.

Launched one by one, an 8B model's 300 kernels take a host some 20 ms, of which the GPU works 8 at 32 tokens: it is the
host that a first token waits for. A graph is for a number of tokens; a chunk of fewer is followed by tokens that write
to the null block and see nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bireme.engines.child.lost_device import raise_if_lost
from bireme.engines.torch.forward.graphs import StepGraph, make_graph
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.step import Batch, KernelGroup, PackedChunks

logger = logging.getLogger("bireme.engines.torch")

_SIZES = (32, 64, 128, 192, 256)  # tokens; with more the GPU works about as long as their kernels take to launch
_FEW, _MOST_SEEN = 128, 8192  # more tokens than the one behind more than the other are flash attention's, if it may be


class PromptGraphs:
    """Made and replayed by the engine's thread; until one is made, prompts are launched kernel by kernel."""

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],
        windows: Sequence[int],
        limits: EngineLimits,
        device: torch.device,
        has_grid_positions: bool = False,
    ) -> None:
        self._compute, self._windows, self._device = compute, windows, device
        self._most_seen, self._has_grid_positions = limits.max_seq_len, has_grid_positions
        self._to_make = sizes_up_to(min(limits.max_num_tokens, limits.max_seq_len))
        self._graphs: dict[int, StepGraph] = {}
        self._logits: Tensor | None = None  # (1, vocabulary), of every graph

    def make_next_graph(self) -> bool:
        """Make the largest that is not made; False: there is none. One that can't be made is the last."""
        if not self._to_make:
            return False
        size, began = self._to_make.pop(), time.monotonic()
        try:
            self._graphs[size] = self._make(size)
        except Exception as error:  # of whatever the model does that a graph can't hold
            raise_if_lost(error, f"the graph of a prompt of {size} tokens")
            self._to_make = []
            logger.warning("prompt_graph_off tokens=%d reason=%s", size, str(error).partition("\n")[0])
        else:
            logger.info("prompt_graph_made tokens=%d s=%.3f", size, time.monotonic() - began)
        return True

    def size_for(self, batch: Batch) -> int:
        """Return the size of the graph that holds this step, one chunk and nothing else; 0: none does."""
        if batch.num_decodes or batch.embeddings or batch.prompt_rows:
            return 0
        count, chunks = batch.ids.shape[1], batch.groups[0].chunks
        size = min((size for size in self._graphs if size >= count), default=0)
        if len(chunks) != 1 or not isinstance(chunks[0], PackedChunks) or not chunks[0].is_single:
            return 0
        return 0 if count > _FEW and chunks[0].longest_key > _MOST_SEEN else size

    def replay(self, batch: Batch, size: int) -> Tensor:
        """Return the chunk's logits (0 or 1, vocabulary)."""
        made = self._graphs[size]
        _fill(made.batch, batch, batch.ids.shape[1])
        made.graph.replay()
        assert self._logits is not None and batch.logits_rows is not None
        return self._logits[: len(batch.logits_rows)]

    def _make(self, size: int) -> StepGraph:
        batch = self._batch(size)
        if self._logits is None:
            self._logits = torch.empty_like(self._compute(batch))
        pool = next((made.graph.pool() for made in self._graphs.values()), None)
        return StepGraph(make_graph(partial(self._run, batch), pool, lambda: batch.ids.fill_(7)), batch)

    def _run(self, batch: Batch) -> Tensor:
        assert self._logits is not None
        return self._logits.copy_(self._compute(batch))

    def _batch(self, size: int) -> Batch:
        """Return a chunk that sees itself alone, all in the null block's first row."""
        zeros = partial(torch.zeros, dtype=torch.int64, device=self._device)
        begins = torch.tensor([0, size], dtype=torch.int32, device=self._device)
        groups = []
        for window in self._windows:
            most = max(size, min(self._most_seen, window - 1 + size) if window else self._most_seen)
            chunk = PackedChunks(
                0, size, zeros(most), begins.clone(), begins.clone(), longest_query=size, longest_key=most,
                is_fresh=False, is_padded=True,
            )  # fmt: skip
            groups.append(KernelGroup(zeros(size), None, [chunk], window))
        positions = zeros(3, 1, size) if self._has_grid_positions else zeros(1, size)
        return Batch(zeros(1, size), positions, zeros(1), groups, [], [])


def sizes_up_to(longest: int) -> list[int]:
    """Return the numbers of tokens that graphs are made for where no chunk is longer."""
    return [size for at, size in enumerate(_SIZES) if not at or _SIZES[at - 1] < longest]


def _fill(own: Batch, batch: Batch, count: int) -> None:
    """Copy a chunk of `count` tokens into a graph's; what follows them writes to the null block."""
    assert own.logits_rows is not None and batch.logits_rows is not None
    own.ids[:, :count].copy_(batch.ids)
    own.ids[:, count:].zero_()  # all alike: they choose the same experts
    own.positions[..., :count].copy_(batch.positions)
    own.logits_rows[: len(batch.logits_rows)].copy_(batch.logits_rows)
    for mine, group in zip(own.groups, batch.groups, strict=True):
        assert isinstance(mine, KernelGroup) and isinstance(group, KernelGroup)
        mine.slots[:count].copy_(group.slots)
        mine.slots[count:].zero_()
        to, chunk = mine.chunks[0], group.chunks[0]
        to.rows[: len(chunk.rows)].copy_(chunk.rows)
        to.query_begins.copy_(chunk.query_begins)
        to.key_begins.copy_(chunk.key_begins)
