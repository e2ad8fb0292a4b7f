"""Steps of decodes and prompts' tokens together over the state of ResidentDecode: each row is one token.

Who decodes and where chunks begin is data, so one CUDA graph for each number of rows holds them all, and the tokens
are chosen on the GPU: the step after one is started before anybody has read those. A step between two sizes is
filled up with rows that see nothing and write to the null block. Until its graph is made it is launched kernel by
kernel.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bireme.engines.torch.forward.decode_state import DecodeState, Ints
from bireme.engines.torch.forward.flight import Flight
from bireme.engines.torch.forward.fused_decoder import FusedDecoder
from bireme.engines.torch.forward.resident_decode import ResidentTables, RowOf, decode_rows
from bireme.engines.torch.forward.sized_graphs import SizedGraphs
from bireme.engines.torch.kernels.chunk_attention import TILE_COLUMNS, cut_into_tiles, tile_tokens
from bireme.engines.torch.kernels.decode_attention import PART_COLUMNS, num_parts
from bireme.engines.torch.kernels.draw import draw
from bireme.engines.torch.kernels.step_begin import BLOCKS, POSITION, SLOT, TOKEN
from bireme.engines.torch.step import SchedulerOutput, Sequence
from bireme.logits.rows import Row

logger = logging.getLogger("bireme.engines.torch")

_SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768)  # rows; with more the GPU works for longer than a launch
_MOST_CHUNKS = 16
_MOST_SEEN = 4096  # tokens before and in a chunk: a longer context is read in parts, or by flash attention
_MOST_SIZE = 2  # times a step's own, of a graph that stands in: filled up with more, kernels are quicker
DRAWN_COLUMNS = 3  # slot, position, row


@dataclass(frozen=True, slots=True)
class MixedTold:
    """What a step of R rows is told, tensors or arrays, all int32."""

    steps: Any  # (R, 3 + 2 * groups)
    parts: Any  # (groups, parts, 7) of the rows that decode
    tiles: Any  # (tiles, 4) of the prompts' rows
    drawn: Any  # (W, 3): whose next token is chosen


class MixedSteps:
    """Used by the engine's thread."""

    def __init__(
        self, decoder: FusedDecoder, state: DecodeState, vocab_size: int, most_tokens: int, has_graphs: bool = True
    ) -> None:
        """`most_tokens`: of a step."""
        self._decoder, self._state, self._vocab_size = decoder, state, vocab_size
        self.most_drawn = len(state.tokens)  # rows that decode, and prompts' last ones
        self._sizes = [size for at, size in enumerate(_SIZES) if not at or _SIZES[at - 1] < most_tokens]
        self._tokens = tile_tokens(decoder.weights.num_heads, state.num_kv)
        length = self._length(self._sizes[-1])
        device, is_cuda = state.told.device, state.told.is_cuda
        self._told = torch.zeros(length, dtype=torch.int32, device=device)
        self._turn = 0  # one step's may be on its way while another one's is filled in
        self._host, self._heard = (
            [torch.zeros(count, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2)]
            for count in (length, self.most_drawn)
        )
        self._tables = ResidentTables(state)
        self.graphs = SizedGraphs(
            self, self._sizes if has_graphs else [], decoder.num_kinds, "mixed_graph_made rows", "mixed_graph_off rows"
        )

    def takes(self, plan: SchedulerOutput) -> bool:
        return (
            not plan.drafts
            and plan.num_tokens <= self._sizes[-1]
            and len(plan.chunks) <= _MOST_CHUNKS
            and all(
                plan.begin_of(sequence) + count <= _MOST_SEEN and not sequence.wants_prompt_logprobs
                for sequence, count in plan.chunks
            )
        )

    def start(self, plan: SchedulerOutput, row_of: RowOf, ahead: int = 0) -> Flight:
        """Start a step. `ahead`: tokens of each that decodes that have been started and not been read."""
        self._turn = 1 - self._turn
        size, host = self._size_for(plan.num_tokens), self._host[self._turn]
        length = self._length(size)
        self._tell(self._views(host.numpy(), size), plan, row_of, ahead)
        self._told[:length].copy_(host[:length], non_blocking=True)
        with torch.inference_mode():
            if (graph := self.graphs.made.get(size)) is not None:
                graph.replay()
            else:
                self.compute(size)
            return Flight.depart(self._state, self._heard[self._turn][: len(plan.sampled)])

    def make_next_graph(self) -> bool:
        """Make one that is still to be made; False: there is none."""
        return self.graphs.make_next()

    def _size_for(self, rows: int) -> int:
        """Return the size of the smallest graph that holds them and is not far larger, or `rows`."""
        own = next(size for size in self._sizes if size >= rows)
        return self.graphs.size_for(own, _MOST_SIZE * own) or rows

    def _length(self, size: int) -> int:
        return self._ends(size)[-1]

    def _ends(self, size: int) -> list[int]:
        """Return where the parts of what is told end."""
        groups, decodes = self._state.num_groups, min(size, self.most_drawn)
        lengths = (
            size * (BLOCKS + 2 * groups),
            groups * num_parts(decodes, self._state.num_kv) * PART_COLUMNS,
            (size // self._tokens + _MOST_CHUNKS) * TILE_COLUMNS,
            decodes * DRAWN_COLUMNS,
        )
        return [int(end) for end in np.cumsum(lengths)]

    def _views(self, told: Any, size: int) -> MixedTold:
        one, two, three, four = self._ends(size)
        groups = self._state.num_groups
        return MixedTold(
            told[:one].reshape(size, -1),
            told[one:two].reshape(groups, -1, PART_COLUMNS),
            told[two:three].reshape(-1, TILE_COLUMNS),
            told[three:four].reshape(-1, DRAWN_COLUMNS),
        )

    def _tell(self, told: MixedTold, plan: SchedulerOutput, row_of: RowOf, ahead: int) -> None:
        state, decodes = self._state, plan.decodes
        tokens, slots, positions = decode_rows(plan, ahead)
        state.fill_steps(told.steps, slots, positions)
        state.fill_parts(told.parts, slots, positions)
        told.steps[: len(tokens), TOKEN] = tokens
        drawn = [(slot, position, row) for row, (slot, position) in enumerate(zip(slots, positions, strict=True))]
        firsts, tiles, row = list(enumerate(decodes)), [], len(tokens)
        for sequence, count in plan.chunks:
            first = plan.begin_of(sequence)
            end = first + count
            own = told.steps[row : row + count]
            own[:, SLOT], own[:, POSITION] = sequence.slot, range(first, end)
            own[:, TOKEN] = sequence.tokens[first:end]
            tiles.append(cut_into_tiles(row, count, sequence.slot, first, self._tokens))
            firsts.append((row, sequence))
            row += count
            if end == len(sequence.tokens):
                drawn.append((sequence.slot, end - 1, row - 1))
        told.tiles[:] = 0
        found: Ints = np.concatenate(tiles) if tiles else told.tiles[:0]
        told.tiles[: len(found)] = found
        told.drawn[:] = (state.spare, 0, 0)
        told.drawn[: len(drawn)] = drawn or told.drawn[:0]
        self._tables.tell(told.steps, firsts, row_of)

    def compute(self, size: int, num_layers: int | None = None) -> Tensor:
        """A step as it is told; of the first layers alone for what their kernels need."""
        state, told = self._state, self._views(self._told, size)
        logits = self._decoder.mixed(state, told.steps, told.parts, told.tiles, told.drawn[:, 2], num_layers)
        tokens = state.tokens[: len(told.drawn)]
        draw(logits, told.drawn, state.requests, state.last, tokens, self._vocab_size)
        return logits

    def tell_nothing(self, size: int) -> None:
        """Have the next computation be one of rows that nobody has."""
        nothing = torch.zeros(self._length(size), dtype=torch.int32)
        self._tell(self._views(nothing.numpy(), size), SchedulerOutput(), _no_row, 0)
        self._told[: len(nothing)].copy_(nothing)


def _no_row(sequence: Sequence) -> Row:
    raise AssertionError("a step of nothing asks for no row")
