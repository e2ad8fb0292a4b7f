"""What decode steps on a GPU read and write between them, and how a step is told what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bireme.engines.torch.forward.decoder_weights import DecoderWeights
from bireme.engines.torch.kernels.decode_attention import (
    PART_COLUMNS,
    Scratch,
    cut_into_parts,
    most_parts,
    num_parts,
    tile_of,
)
from bireme.engines.torch.kernels.draft_attention import RUN_COLUMNS, Runs, cut_runs, most_tokens
from bireme.engines.torch.kernels.draw import NUM_COLUMNS
from bireme.engines.torch.kernels.step_begin import BLOCKS, NO_BLOCK, POSITION, SLOT
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.weights.eagle_bytes import MOST_IN_ROUND

Ints = npt.NDArray[np.int32]


def filling_token(embeddings: torch.Tensor) -> int:
    """Return a token that has an embedding, of (V, W), for rows that nobody has.

    Padding's may be zero. Then so are its logits, and of a graph that is compared by them they tell nothing.
    """
    return int(embeddings.any(1).int().argmax())


class DecodeState:
    """What decode steps read and write between them. A slot is a sequence's; one more is of rows that fill up."""

    def __init__(
        self,
        weights: DecoderWeights,
        store: KvStore,
        num_slots: int,
        columns: int,
        most_rows: int,
        max_draft_len: int = 0,
    ) -> None:
        """`columns`: blocks of the longest row."""
        head, size = weights.head, weights.layers[0].rotary.cos_sin.shape[1]
        num_kv, self.num_groups = store.keys[0].shape[1] // size, len(store.groups)
        make: Any = {"dtype": torch.int32, "device": head.device}
        self.spare, self.num_kv, self.tile = num_slots, num_kv, tile_of(store.dtype, size)
        self.windows, self.run_tokens = store.windows, most_tokens(max_draft_len)
        self._filling = filling_token(weights.embeddings)
        self.told = torch.zeros(self.size_of(most_rows, bool(max_draft_len)), **make)
        self.tables = torch.zeros(self.num_groups, num_slots + 1, columns, **make)
        self.requests = torch.zeros(num_slots + 1, NUM_COLUMNS, **make)
        self.last = torch.zeros(num_slots + 1, **make)
        self.drafted = torch.zeros(max(1, max_draft_len * min(num_slots, MOST_IN_ROUND)), **make)  # by a head
        self.tokens = torch.zeros(most_rows, **make)
        self.logits = torch.empty(most_rows, len(head), dtype=torch.float32, device=head.device)
        self.scratch = Scratch.make(most_rows, weights.num_heads, num_kv, size, head.device)

    def size_of(self, rows: int, has_drafts: bool = False) -> int:
        columns = RUN_COLUMNS if has_drafts else PART_COLUMNS
        return rows * (BLOCKS + 2 * self.num_groups) + self.num_groups * num_parts(rows, self.num_kv) * columns

    def views(self, told: Any, rows: int, has_drafts: bool = False) -> tuple[Any, Any]:
        """Return steps (rows, 3 + 2 * groups) and parts (groups, num_parts, 7) in a tensor or array; with drafts runs'
        parts (groups, num_parts, 9).
        """
        columns = BLOCKS + 2 * self.num_groups
        steps, parts = told[: rows * columns], told[rows * columns : self.size_of(rows, has_drafts)]
        shape = self.num_groups, -1, RUN_COLUMNS if has_drafts else PART_COLUMNS
        return steps.reshape(rows, columns), parts.reshape(*shape)

    def fill(self, told: Ints, rows: int, slots: Ints, positions: Ints) -> Ints:
        """Say which rows there are, of a step for `rows` of one token each; return `steps`, less their tokens."""
        steps, parts = self.views(told, rows)
        self.fill_steps(steps, slots, positions)
        self.fill_parts(parts, steps[:, SLOT], steps[:, POSITION])
        found: Ints = steps
        return found

    def fill_runs(self, parts: Ints, slots: Ints, positions: Ints, drafts: Ints) -> None:
        """Cut what sequences with drafts see into parts, (groups, parts, 9); `drafts` as in Runs."""
        runs = Runs.of(slots, positions, drafts, self.run_tokens)
        for group, window in enumerate(self.windows):
            parts[group] = cut_runs(runs, parts.shape[1], most_parts(self.num_kv), window, self.tile)

    def fill_steps(self, steps: Ints, slots: Ints, positions: Ints) -> None:
        """Say what the first rows are; the others write to the null block."""
        steps[:] = (self.spare, 0, self._filling, *[NO_BLOCK] * (2 * self.num_groups))
        steps[: len(slots), SLOT], steps[: len(slots), POSITION] = slots, positions

    def fill_parts(self, parts: Ints, slots: Ints, positions: Ints) -> None:
        """Cut what these rows see into parts, (groups, parts, 7)."""
        for group, window in enumerate(self.windows):
            most = most_parts(self.num_kv)
            parts[group] = cut_into_parts(slots, positions, parts.shape[1], most, window, self.tile)
