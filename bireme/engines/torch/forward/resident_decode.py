"""Decode steps whose state stays on the GPU: tokens, block tables and sampling parameters of every running request.

A step is told, in one small copy, which requests take part and which blocks are new. It finds the tokens that the step
before chose on the GPU, and chooses the next ones there; so it can be started before anybody has read those. One CUDA
graph for each bucket of batch sizes holds it all.

Steps with drafts are of a kind of their own: a sequence has a row for its last token and one for each of its draft.
Keys and values of all rows are stored before any attends. A sequence's rows read its KV together. All rows' tokens are
chosen. Which of them count is decided when they have been read, and the next step is not started before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bireme.engines.torch import step
from bireme.engines.torch.forward.decode_state import DecodeState, Ints
from bireme.engines.torch.forward.flight import Flight
from bireme.engines.torch.forward.fused_decoder import FusedDecoder
from bireme.engines.torch.forward.sized_graphs import SizedGraphs
from bireme.engines.torch.kernels.draw import draw, step_columns
from bireme.engines.torch.kernels.step_begin import BLOCKS, FIRST_DRAFTED, TAKE_LAST, TOKEN
from bireme.engines.torch.step import DrawnDraft
from bireme.logits.rows import Row
from bireme.logits.sending import send

logger = logging.getLogger("bireme.engines.torch")

_APART = 16  # times as large: a step of few rows takes little less than one of many, whose rows nobody has

RowOf = Callable[[step.Sequence], Row]


def decode_rows(plan: step.SchedulerOutput, ahead: int = 0) -> tuple[Ints, Ints, Ints]:
    """Return tokens, slots and positions of a step's decode rows, those of drafts last.

    `ahead`: tokens of each sequence that have been started and not been read.
    """
    decodes = plan.decodes
    tokens = [TAKE_LAST if ahead else one.tokens[-1] for one in decodes]
    slots = [one.slot for one in decodes]
    positions = [len(one.tokens) - 1 + ahead for one in decodes]
    for one, drafts in plan.drafts.items():
        first, count = len(one.tokens), len(drafts)
        tokens += [FIRST_DRAFTED - at for at in drafts.places] if isinstance(drafts, DrawnDraft) else drafts
        slots += [one.slot] * count
        positions += range(first, first + count)
    found = np.array([tokens, slots, positions], dtype=np.int32)
    return found[0], found[1], found[2]


def _drafts_of(plan: step.SchedulerOutput) -> Ints:
    """Return of each sequence where the rows of its draft begin, and how many there are (S, 2)."""
    begin, places = len(plan.decodes), {}
    for one, drafts in plan.drafts.items():
        places[one] = begin, len(drafts)
        begin += len(drafts)
    return np.array([places.get(one, (0, 0)) for one in plan.decodes], dtype=np.int32)


class SlotTables(Protocol):
    """What a GPU has of the requests by their slots."""

    told: Tensor
    tables: Tensor  # (groups, slots, columns) int32: block ids
    requests: Tensor  # (slots, 7) int32: `request_columns`


class ResidentTables:
    """Tells the GPU of requests that are new there, and of their new blocks."""

    def __init__(self, state: SlotTables) -> None:
        self._state = state

    def tell(self, steps: Ints, rows: Sequence[tuple[int, step.Sequence]], row_of: RowOf) -> None:
        """Fill in the block that each request has got, in its first row; of new ones, or with more, all is copied."""
        new = []
        for row, sequence in rows:
            blocks, resident = sequence.table.blocks, sequence.resident
            counts = list(map(len, blocks))
            if counts == resident:
                continue  # most have no new ones
            if not resident or any(count > known + 1 for count, known in zip(counts, resident, strict=True)):
                new.append(sequence)
                sequence.resident = counts
                continue
            for group, known in enumerate(resident):
                if len(blocks[group]) > known:
                    steps[row, BLOCKS + 2 * group : BLOCKS + 2 * group + 2] = known, blocks[group][known]
                    resident[group] = known + 1
        if new:
            self._copy_whole(new, row_of)

    def _copy_whole(self, new: Sequence[step.Sequence], row_of: RowOf) -> None:
        state = self._state
        device = state.told.device
        slots = send(np.array([sequence.slot for sequence in new]), device)
        params = np.stack([step_columns(row_of(sequence), sequence.num_prompt) for sequence in new])
        state.requests.index_copy_(0, slots, send(params, device))
        for group, table in enumerate(state.tables):
            rows = np.zeros((len(new), max(len(sequence.table.blocks[group]) for sequence in new)), dtype=np.int32)
            for row, sequence in zip(rows, new, strict=True):
                row[: len(sequence.table.blocks[group])] = sequence.table.blocks[group]
            table[:, : rows.shape[1]].index_copy_(0, slots, send(rows, device))


class ResidentDecode:
    """Used by the engine's thread."""

    def __init__(
        self,
        decoder: FusedDecoder,
        state: DecodeState,
        vocab_size: int,
        sizes: Sequence[int],
        graphs: Sequence[int] = (),
        is_padded: bool = True,
        has_drafts: bool = False,
    ) -> None:
        """`sizes`: numbers of rows that steps are made for, those with a graph among them.

        Padded: a step between two sizes is filled up, otherwise launched as it is. `has_drafts`: of its steps.
        """
        self.most_rows, self._has_drafts = sizes[-1], has_drafts
        self.decoder, self.vocab_size = decoder, vocab_size
        self._state, self._sizes, self._tables = state, sizes, ResidentTables(state)
        self._is_cuda = state.told.device.type == "cuda"
        self._turn = 0
        shapes = (state.told.shape, state.tokens.shape)
        self._told, self._heard = (
            [torch.zeros(shape, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(2)] for shape in shapes
        )
        self._is_padded = is_padded
        self.graphs = SizedGraphs(
            self,
            sorted(graphs),
            decoder.num_kinds,
            "verify_graph_made rows" if has_drafts else "decode_graph_made size",
            "verify_graph_off rows" if has_drafts else "graph_off size",
            _APART,
        )

    @property
    def drafted(self) -> Tensor:
        """What steps with drafts find a head's tokens in, (tokens,) int32."""
        return self._state.drafted

    def start(self, plan: step.SchedulerOutput, row_of: RowOf, ahead: int = 0) -> Flight:
        """Start a step of decodes alone. `ahead`: tokens of each that have been started and not been read."""
        self._turn = 1 - self._turn
        count, state = plan.num_decode_rows, self._state
        size = self._size_for(count)
        told = self._told[self._turn]
        self._tell(told.numpy(), plan, row_of, ahead, size)
        length = state.size_of(size, self._has_drafts)
        state.told[:length].copy_(told[:length], non_blocking=True)
        with torch.inference_mode():
            if (graph := self.graphs.made.get(size)) is not None:
                graph.replay()
            else:
                self.compute(size)
            return Flight.depart(state, self._heard[self._turn][:count])

    def make_next_graph(self) -> bool:
        """Make one that is still to be made; False: there is none."""
        return self.graphs.make_next()

    def _size_for(self, count: int) -> int:
        """Return the size of the step for so many rows; where their own graph is missing a larger one stands in."""
        if not self._is_padded:
            return self.graphs.size_for(count, count) or count
        own = next(size for size in self._sizes if size >= count)
        return self.graphs.size_for(own, self.most_rows) or own

    def _tell(self, told: Ints, plan: step.SchedulerOutput, row_of: RowOf, ahead: int, size: int) -> None:
        """Fill in what the step is told."""
        tokens, slots, positions = decode_rows(plan, ahead)
        steps = self._fill(told, size, slots, positions, _drafts_of(plan) if self._has_drafts else None)
        steps[: len(tokens), TOKEN] = tokens
        self._tables.tell(steps, list(enumerate(plan.decodes)), row_of)

    def _fill(self, told: Ints, size: int, slots: Ints, positions: Ints, drafts: Ints | None) -> Ints:
        """Say which rows there are; return `steps`, less their tokens. `drafts`: where theirs are, (sequences, 2)."""
        state = self._state
        if drafts is None:
            return state.fill(told, size, slots, positions)
        steps, parts = state.views(told, size, has_drafts=True)
        state.fill_steps(steps, slots, positions)
        state.fill_runs(parts, slots[: len(drafts)], positions[: len(drafts)], drafts)
        found: Ints = steps
        return found

    def compute(self, size: int, num_layers: int | None = None) -> Tensor:
        """A step as it is told; of the first layers alone for what their kernels need."""
        state = self._state
        steps, parts = state.views(state.told, size, self._has_drafts)
        if self._has_drafts:
            logits = self.decoder.mixed(state, steps, parts, num_layers=num_layers)
        else:
            logits = self.decoder.decode(state, size, num_layers)
        draw(logits, steps, state.requests, state.last, state.tokens[:size], self.vocab_size)
        return logits

    def tell_nothing(self, size: int) -> None:
        """Have the next computation be one of rows that nobody has."""
        nothing, state = np.zeros(0, dtype=np.int32), self._state
        told = np.zeros(state.size_of(size, self._has_drafts), dtype=np.int32)
        self._fill(told, size, nothing, nothing, nothing.reshape(0, 2) if self._has_drafts else None)
        state.told[: len(told)].copy_(torch.from_numpy(told))
