"""A head's round of drafts on a GPU as one launch: what it has not seen of its sequences, and a pass for each token.

Rows of places that the head has not seen come first, of all sequences together: only the last of each is attended and
goes on, since of the others keys and values are enough. Its token is drawn on the GPU, and the next pass reads it
there, with the head's own row in the model's place. The step that verifies them finds them there, too. So the host
tells a round once, starts that step behind it, and reads which tokens were drafted when it has read what the model
says. There is a CUDA graph for each bucket of sequences and number of passes. Rows that fill one up write to the null
block.

A token is drawn by seed and place, temperature, top-k, top-p and min-p, as the model draws it (`kernels/draw.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.engines.torch import step
from bireme.engines.torch.forward.decode_graphs import bucket_sizes
from bireme.engines.torch.forward.decode_state import Ints, filling_token
from bireme.engines.torch.forward.decoder_weights import DecoderLayer, DecoderWeights
from bireme.engines.torch.forward.eagle_head import EagleHead
from bireme.engines.torch.forward.fused_decoder import logits_of
from bireme.engines.torch.forward.products import products_for
from bireme.engines.torch.forward.resident_decode import ResidentTables
from bireme.engines.torch.forward.sized_graphs import SizedGraphs
from bireme.engines.torch.forward.tapped import TappedPlaces
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.kernels.decode_attention import (
    PART_COLUMNS,
    Scratch,
    cut_into_parts,
    decode_attention,
    most_parts,
    num_parts,
    tile_of,
)
from bireme.engines.torch.kernels.draw import NUM_COLUMNS, draw
from bireme.engines.torch.kernels.one_row_linear import one_row_linear
from bireme.engines.torch.kernels.rotary import rotate_and_store
from bireme.engines.torch.kernels.row_wise import rms_norm
from bireme.engines.torch.kernels.step_begin import BLOCKS, NO_BLOCK, POSITION, SLOT, TOKEN, begin_step
from bireme.engines.torch.pools.kv_store import HeadRows
from bireme.engines.torch.step import DraftedSequence, DrawnDraft
from bireme.engines.torch.weights.eagle_bytes import MOST_IN_ROUND
from bireme.logits.rows import Row

logger = logging.getLogger("bireme.engines.torch")

_APART = 16  # as of decode steps: a round of few sequences takes little less than one of many
_COLUMNS = BLOCKS + 2  # of a row: the head has one group


@dataclass(frozen=True, slots=True)
class RoundTold:
    """What a round of S sequences and R = S (1 + k) rows is told, tensors or arrays, int32."""

    rows: Any  # (R, 5), as begin_step reads them
    cells: Any  # (R,) of `TappedPlaces`
    ends: Any  # (S,): the row of each sequence's last place
    drawn: Any  # (k, S, 2): slot, and place of the token before the one that is drawn
    parts: Any  # (k, parts, 7): what the passes' rows see


class _Round:
    """Tokens of a round that has been started."""

    __slots__ = ("_done", "_heard", "_tokens")

    def __init__(self, heard: Tensor, done: torch.cuda.Event | None) -> None:
        """`heard` (k, sequences), host memory: there when `done` is over."""
        self._heard, self._done = heard, done
        self._tokens: list[int] | None = None

    def read(self) -> list[int]:
        """Wait for them, at the first call."""
        if self._tokens is None:
            if self._done is not None:
                self._done.synchronize()
            self._tokens = self._heard.clamp(min=0).flatten().tolist()
        return self._tokens


class EagleRounds:
    """Used by the engine's thread. Sequences are as the head has them: places are counted from its first."""

    def __init__(
        self,
        head: EagleHead,
        store: HeadRows,
        places: TappedPlaces,
        embeddings: Tensor,
        scale: float,
        limits: EngineLimits,
        has_graphs: bool,
        drafted: Tensor,
    ) -> None:
        """`store`: its layer 0 is the head's. `embeddings` (vocabulary, h): what it reads of tokens, times `scale`.

        `drafted`: where the model's steps find what it drafts (`DecodeState`).
        """
        shape, device, dtype = head.shape, embeddings.device, embeddings.dtype
        self._head, self._store, self.places = head, store, places
        self._embeddings, self._scale, self._length = embeddings, scale, limits.max_draft_len
        self.most_sequences = min(limits.max_batch_size, MOST_IN_ROUND)
        self.most_rows = self.most_sequences * (1 + self._length)
        self._sizes = bucket_sizes(self.most_sequences)
        self._weights = _weights_of(head, embeddings, limits.max_seq_len)
        self._tile = tile_of(dtype, shape.head_size)
        self._spare, most = limits.max_batch_size, self.most_sequences
        self._filling = filling_token(embeddings)
        make: Any = {"dtype": torch.int32, "device": device}
        self.told = torch.zeros(self._ends(most)[-1], **make)
        self.tables = torch.zeros(1, self._spare + 1, limits.most_blocks, **make)
        self.requests = torch.zeros(self._spare + 1, NUM_COLUMNS, **make)
        self._last = torch.zeros(self._spare + 1, **make)
        self._tokens = drafted[: self._length * most].view(self._length, most)
        # (sequences, v) of the last pass
        self.logits = torch.zeros(most, shape.draft_vocab_size, device=device)
        # The head's vocabulary among the model's: noise is a function of the model's ids
        self._whole = torch.full((most, shape.vocab_size), -torch.inf, device=device)
        self._scratch = Scratch.make(most, shape.num_heads, shape.num_kv_heads, shape.head_size, device)
        pinned = device.type == "cuda"
        self._host = torch.zeros(self.told.shape, dtype=torch.int32, pin_memory=pinned)
        self._heard = torch.zeros(self._tokens.shape, dtype=torch.int32, pin_memory=pinned)
        self._last_round = _Round(self._heard, None)
        self.is_as_later = False  # the last one was launched as those to come will be, not for want of a graph yet
        self._tables = ResidentTables(self)
        self._passes = [_RoundOf(self, count) for count in range(1, self._length + 1)]
        sizes = self._sizes if has_graphs else []
        self._graphs = [_graphs_of(each, sizes) for each in self._passes]

    @property
    def graphs(self) -> SizedGraphs:
        """Those of whole drafts, which the first requests need."""
        return self._graphs[-1]

    def make_next_graph(self) -> bool:
        """Make one that is still to be made; False: there is none."""
        return any(graphs.make_next() for graphs in reversed(self._graphs))

    def draft(self, asked: Sequence[tuple[DraftedSequence, int]]) -> list[DrawnDraft]:
        """Start a round; return each one's tokens, which are there when it has ended. 0 stands where none is likeliest.

        `asked`: at most `most_sequences`, each with places that the head has not seen, at most `most_rows` together,
        and the most tokens to draft, 1 to k. Their blocks have room for these.
        """
        self._last_round.read()  # what was told and heard is written anew
        passes = max(most for _, most in asked)
        size = self._size_for(passes, len(asked), sum(one.num_unseen for one, _ in asked))
        self._tell(self._views(self._host.numpy(), size), asked, passes)
        length = self._ends(size)[-1]
        self.told[:length].copy_(self._host[:length], non_blocking=True)
        graphs = self._graphs[passes - 1]
        self.is_as_later = size not in graphs.to_make
        with torch.inference_mode():
            if (graph := graphs.made.get(size)) is not None:
                graph.replay()
            else:
                self.compute(size, passes)
            self._heard.copy_(self._tokens, non_blocking=True)
        done, width = None, self.most_sequences
        if self._tokens.is_cuda:
            done = torch.cuda.Event()
            done.record()
        self._last_round = _Round(self._heard, done)
        read = self._last_round.read
        return [DrawnDraft(read, range(at, at + width * most, width)) for at, (_, most) in enumerate(asked)]

    def _size_for(self, passes: int, count: int, rows: int) -> int:
        """Return the size of the round for so many sequences and rows; where its graph lacks a larger one stands in."""
        own = next(size for size in self._sizes if size >= count and size * (1 + self._length) >= rows)
        return self._graphs[passes - 1].size_for(own, self.most_sequences) or own

    def _ends(self, size: int) -> list[int]:
        """Return where the parts of what is told end."""
        rows, length = size * (1 + self._length), self._length
        parts = num_parts(size, self._head.shape.num_kv_heads) * PART_COLUMNS
        lengths = (rows * _COLUMNS, rows, size, length * size * 2, length * parts)
        return [int(end) for end in np.cumsum(lengths)]

    def _views(self, told: Any, size: int) -> RoundTold:
        one, two, three, four, five = self._ends(size)
        return RoundTold(
            told[:one].reshape(-1, _COLUMNS),
            told[one:two],
            told[two:three],
            told[three:four].reshape(self._length, size, 2),
            told[four:five].reshape(self._length, -1, PART_COLUMNS),
        )

    def _tell(self, told: RoundTold, asked: Sequence[tuple[DraftedSequence, int]], passes: int) -> None:
        owns = [one.own for one, _ in asked]
        each = [(own.slot, own.computed, own.num_prompt) for own in owns]
        slots, firsts, num_prompts = np.array(each, dtype=np.int32).reshape(-1, 3).T
        of_round = [(one.num_unseen, one.base, most, one.row.num_output) for one, most in asked]
        counts, bases, mosts, drawn = np.array(of_round, dtype=np.int32).reshape(-1, 4).T
        begins = counts.cumsum() - counts
        num_rows = int(counts.sum())
        row_slots, row_bases = np.repeat(slots, counts), np.repeat(bases, counts)
        row_places = np.arange(num_rows) - np.repeat(begins - firsts, counts)
        told.rows[:] = (self._spare, 0, self._filling, NO_BLOCK, NO_BLOCK)
        told.rows[:num_rows, SLOT], told.rows[:num_rows, POSITION] = row_slots, row_places
        tokens = [
            own.tokens[own.computed : own.computed + one.num_unseen] for own, (one, _) in zip(owns, asked, strict=True)
        ]
        told.rows[:num_rows, TOKEN] = [token for own in tokens for token in own]
        told.cells[:] = self.places.nothing
        told.cells[:num_rows] = self.places.cells(row_slots, row_bases + row_places)
        told.ends[:] = 0
        told.ends[: len(asked)] = begins + counts - 1
        self._tell_passes(told, passes, mosts, slots, firsts + counts - 1, num_prompts + drawn - 1)
        row_of: dict[step.Sequence, Row] = {one.own: one.row for one, _ in asked}
        self._tables.tell(told.rows, list(zip(begins.tolist(), owns, strict=True)), row_of.__getitem__)

    def _tell_passes(self, told: RoundTold, passes: int, mosts: Ints, slots: Ints, places: Ints, drawn: Ints) -> None:
        """Say what each pass's rows see, and who draws. `places`: of the first pass; `drawn`: of the tokens before.

        What is seen at the furthest places is cut into parts once. Of less than that a last tile is masked.
        """
        count, size, num_kv = len(slots), len(told.ends), self._head.shape.num_kv_heads
        at: Ints = np.zeros((2, size), dtype=np.int32)
        at[0], at[0, :count], at[1, :count] = self._spare, slots, places + mosts - 1
        parts = cut_into_parts(at[0], at[1], told.parts.shape[1], most_parts(num_kv), 0, self._tile)
        numbers = np.arange(passes, dtype=np.int32)[:, None]
        is_on = mosts > numbers
        drawing: Ints = np.zeros((3, passes, size), dtype=np.int32)  # slots, places, and of the tokens before
        drawing[0] = self._spare
        drawing[0, :, :count] = np.where(is_on, slots, self._spare)
        drawing[1, :, :count] = np.where(is_on, places + numbers, 0)
        drawing[2, :, :count] = np.where(is_on, drawn + numbers, 0)
        told.parts[:passes] = parts
        told.parts[:passes, :, 1:3] = drawing[:2, :, parts[:, 0]].transpose(1, 2, 0)
        told.drawn[:passes] = drawing[::2].transpose(1, 2, 0)

    def compute(self, size: int, passes: int) -> Tensor:
        """A round as it is told; returns the logits of its last pass (size, v)."""
        head, told, store = self._head, self._views(self.told, size), self._store
        rotary, block = self._weights.layers[0].rotary, store.tokens_per_block
        embedded = begin_step(told.rows, self.tables, self._last, self._embeddings, self._scale)
        slots, places = told.rows[:, SLOT].contiguous(), told.rows[:, POSITION].contiguous()
        pool_rows = self.tables[0, slots, places // block] * block + places % block
        hidden = head.fuse(self.places.rows.index_select(0, told.cells))
        qkv = self._qkv(embedded, hidden)
        pools, scales = (store.keys[0], store.values[0]), store.scales[0]
        norms = rotary.q_norm, rotary.k_norm, rotary.eps
        rotate_and_store(qkv, *norms, rotary.cos_sin, places, pool_rows, *pools, head.shape.num_heads, scales)
        qkv, x = qkv.index_select(0, told.ends), hidden.index_select(0, told.ends)
        for number in range(passes):
            if number:
                qkv = self._qkv(self._embed(self._tokens[number - 1, :size]), x)
            attended = decode_attention(
                qkv, rotary, told.parts[number], self.tables[0], *pools, self._scratch, block, head.shape.num_heads,
                head.scaling, scales=scales,
            )  # fmt: skip
            products = products_for(self._weights, x, is_decode=True)
            products.add_output(self._weights.layers[0], attended)
            products.add_mlp(self._weights.layers[0])
            x = products.rows()
            logits = self._draw(x, told.drawn[number], self._tokens[number, :size])
        return logits

    def _draw(self, x: Tensor, drawn: Tensor, tokens: Tensor) -> Tensor:
        """Fill `tokens` (size,) from what the layer made, x (size, h); return the head's logits (size, v)."""
        weights, size = self._weights, len(x)
        logits, whole = self.logits[:size], self._whole[:size]
        if size == 1:
            one_row_linear(x, weights.head, None, weights.norm, weights.eps, out=logits)
        else:
            logits_of(rms_norm(x, weights.norm, weights.eps), weights.head, logits)
        whole.index_copy_(1, self._head.base_ids, logits)
        draw(whole, drawn, self.requests, self._last, tokens, self._head.shape.vocab_size)
        return logits

    def _qkv(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return queries, keys and values of rows (n, h) each."""
        head, eps = self._head, self._weights.eps
        both = torch.cat([rms_norm(embedded, head.input_norm, eps), rms_norm(hidden, head.hidden_norm, eps)], -1)
        return one_row_linear(both, head.qkv, None) if len(both) == 1 else F.linear(both, head.qkv)

    def _embed(self, tokens: Tensor) -> Tensor:
        found = F.embedding(tokens.clamp(min=0), self._embeddings)
        return found if self._scale == 1 else found.mul_(self._scale)

    def tell_nothing(self, size: int) -> None:
        """Have the next round be one of rows that nobody has."""
        length = self._ends(size)[-1]
        told = torch.zeros(length, dtype=torch.int32)
        self._tell(self._views(told.numpy(), size), (), self._length)
        self.told[:length].copy_(told)


class _RoundOf:
    """Rounds of so many passes, as graphs are made of them."""

    def __init__(self, rounds: EagleRounds, count: int) -> None:
        self._rounds, self.count = rounds, count

    def tell_nothing(self, size: int) -> None:
        self._rounds.tell_nothing(size)

    def compute(self, size: int, num_layers: int | None = None) -> Tensor:
        """There is one layer."""
        return self._rounds.compute(size, self.count)


def _graphs_of(passes: _RoundOf, sizes: Sequence[int]) -> SizedGraphs:
    made, off = (f"eagle_graph_{what} passes={passes.count} sequences" for what in ("made", "off"))
    return SizedGraphs(passes, sizes, 1, made, off, _APART)


def _weights_of(head: EagleHead, embeddings: Tensor, max_seq_len: int) -> DecoderWeights:
    """Return the head's layer for the decoder's products; its queries, keys and values are made otherwise."""
    layer = DecoderLayer(
        attention_norm=head.hidden_norm,
        qkv=head.qkv,
        qkv_bias=None,
        output=head.output,
        mlp_norm=head.mlp_norm,
        gate_up=head.gate_up,
        down=head.down,
        rotary=head.rotary(max_seq_len),
        scaling=head.scaling,
    )
    return DecoderWeights(embeddings, (layer,), head.norm, head.lm_head, head.shape.eps, head.shape.num_heads)
