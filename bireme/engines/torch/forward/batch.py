"""Turns a plan into one packed row of tensors: ids, positions, pool rows, masks. Numpy, no loop over tokens.

Decode rows come first, then those of drafts, which are decode rows at later positions of the same sequences, then
chunks in the plan's order. Block tables of running sequences are mirrored in one array per
group, so that a decode step gathers them at once; only new blocks are copied.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bireme.engines.torch.step import (
    Batch,
    ChunkView,
    DecodeTable,
    DecodeView,
    GroupStep,
    KernelGroup,
    PackedChunks,
    PromptRows,
    SchedulerOutput,
    Sequence,
    TableStep,
)

Ints = npt.NDArray[np.int64]


class BatchBuilder:
    def __init__(
        self,
        windows: list[int],
        tokens_per_block: int,
        max_batch_size: int,
        max_seq_len: int,
        device: torch.device,
        has_grid_positions: bool = False,
        uses_kernels: bool = False,
        uses_tables: bool = False,
    ) -> None:
        """`has_grid_positions`: the model's rotary positions have three dimensions.

        `uses_tables`: a CPU's step is told as TableStep, in place of GroupStep.
        """
        columns = -(-max_seq_len // tokens_per_block) + 1
        self._windows = windows
        self._size = tokens_per_block
        self._device = device
        self._has_grid_positions = has_grid_positions
        self.uses_kernels = uses_kernels
        self._uses_tables = uses_tables
        self._most_seen = max_seq_len  # tokens whose KV is gathered at once
        self._tables = [np.zeros((max_batch_size, columns), dtype=np.int64) for _ in windows]
        self._table_tensors = [torch.from_numpy(table) for table in self._tables] if uses_tables else []

    def build(self, plan: SchedulerOutput) -> Batch:
        if self._uses_tables:
            return self._build_of_tables(plan)
        ids, positions = self._tokens(plan)
        sampled, rows, prompt_rows = _logits_rows(plan)
        groups: list[Any] = []
        make_group = self._kernel_group if self.uses_kernels else self._group
        for group, window in enumerate(self._windows):
            self._mirror(group, plan)
            groups.append(make_group(group, window, plan, positions))
        return Batch(
            self._tensor(ids).unsqueeze(0),
            self._rope(plan, positions),
            self._tensor(np.asarray(rows, dtype=np.int64)),
            groups,
            sampled,
            prompt_rows,
            _embeddings(plan),
            plan.num_decode_rows,
            is_decode=not plan.chunks,
        )

    def _build_of_tables(self, plan: SchedulerOutput) -> Batch:
        """The same with two operations of numpy and torch, each of which costs a step of one row some 20 us."""
        sampled, logits_rows, prompt_rows = _logits_rows(plan)
        ids, positions, rows = _decode_rows(plan)
        count = len(ids)
        for sequence, length in plan.chunks:
            first = sequence.computed
            ids += sequence.tokens[first : first + length]
            positions += range(first, first + length)
            rows += [sequence.slot] * length
        numbers = np.array([[ids], [positions], [rows]], dtype=np.int64)
        tokens, at = torch.from_numpy(numbers).unbind(), numbers[1, 0]
        groups = []
        for group, window in enumerate(self._windows):
            self._mirror(group, plan)
            chunks = self._chunks(self._tables[group], window, plan, at)
            groups.append(TableStep(self._table_tensors[group], tokens[2], count, chunks, bool(plan.drafts)))
        wanted = torch.tensor(logits_rows, dtype=torch.int64) if plan.chunks else None
        return Batch(
            tokens[0], tokens[1], wanted, groups, sampled, prompt_rows, num_decodes=count, is_decode=not plan.chunks
        )

    def _rope(self, plan: SchedulerOutput, positions: Ints) -> Tensor:
        if not self._has_grid_positions:
            return self._tensor(positions).unsqueeze(0)
        parts, begin = [], 0
        drafts = ((sequence, len(ids)) for sequence, ids in plan.drafts.items())
        for sequence, count in [*((sequence, 1) for sequence in plan.decodes), *drafts, *plan.chunks]:
            at = positions[begin : begin + count]
            if sequence.pictures is None:
                parts.append(np.broadcast_to(at, (3, count)))
            else:
                parts.append(sequence.pictures.positions(int(at[0]), int(at[-1]) + 1))
            begin += count
        return self._tensor(np.concatenate(parts, axis=1)).unsqueeze(1)

    def _tokens(self, plan: SchedulerOutput) -> tuple[Ints, Ints]:
        ids, at, _ = _decode_rows(plan)
        positions = [np.array(at, dtype=np.int64)]
        for sequence, count in plan.chunks:
            ids += sequence.tokens[sequence.computed : sequence.computed + count]
            positions.append(np.arange(sequence.computed, sequence.computed + count))
        return np.array(ids, dtype=np.int64), np.concatenate(positions)

    def _mirror(self, group: int, plan: SchedulerOutput) -> None:
        table = self._tables[group]
        for sequence in plan.sequences:
            blocks, known = sequence.table.blocks[group], sequence.mirrored[group]
            if len(blocks) > known:
                table[sequence.slot, known : len(blocks)] = blocks[known:]
                sequence.mirrored[group] = len(blocks)

    def _group(self, group: int, window: int, plan: SchedulerOutput, positions: Ints) -> GroupStep:
        table, size, count = self._tables[group], self._size, plan.num_decode_rows
        slots = np.empty(len(positions), dtype=np.int64)
        decode = None
        if count:
            rows, at = np.array(_decode_rows(plan)[2]), positions[:count]
            slots[:count] = table[rows, at // size] * size + at % size
            decode = self._decode(table, rows, at, window)
        begin = count
        for sequence, length in plan.chunks:
            end = begin + length
            at = positions[begin:end]
            slots[begin:end] = table[sequence.slot][at // size] * size + at % size
            begin = end
        return GroupStep(self._tensor(slots), decode, self._chunks(table, window, plan, positions))

    def _chunks(self, table: Ints, window: int, plan: SchedulerOutput, positions: Ints) -> list[ChunkView]:
        chunks, begin = [], plan.num_decode_rows
        for sequence, length in plan.chunks:
            chunks.append(self._chunk(table[sequence.slot], positions[begin : begin + length], window, begin))
            begin += length
        return chunks

    def _decode(self, table: Ints, rows: Ints, positions: Ints, window: int) -> DecodeView:
        size = self._size
        seen_from = np.maximum(positions - window + 1, 0) if window else np.zeros_like(positions)
        first_block, last_block = seen_from // size, positions // size
        width = int((last_block - first_block).max()) + 1
        columns = first_block[:, None] + np.arange(width)  # (rows, width)
        inside = columns <= last_block[:, None]
        blocks = np.where(inside, table[rows[:, None], np.minimum(columns, table.shape[1] - 1)], 0)
        first, last = seen_from - first_block * size, positions + 1 - first_block * size
        view = DecodeView(self._tensor(blocks.reshape(-1)), len(rows), width, int(first[0]), int(last[0]), None)
        if (first != first[0]).any() or (last != last[0]).any():
            token = np.arange(width * size)
            visible = (token >= first[:, None]) & (token < last[:, None])
            view.mask = self._tensor(visible)[:, None, None, :]
        return view

    def _chunk(self, blocks: Ints, positions: Ints, window: int, begin: int) -> ChunkView:
        size, count = self._size, len(positions)
        start, end = int(positions[0]), int(positions[-1]) + 1
        is_fresh = start == 0
        if is_fresh and (not window or count <= window):
            return ChunkView(begin, begin + count, None, None)
        seen = np.arange(max(0, start - window + 1) if window else 0, end)
        visible = seen <= positions[:, None]
        if window:
            visible &= seen > positions[:, None] - window
        rows = None if is_fresh else self._tensor(blocks[seen // size] * size + seen % size)
        return ChunkView(begin, begin + count, rows, self._tensor(visible)[None, None])

    def _kernel_group(self, group: int, window: int, plan: SchedulerOutput, positions: Ints) -> KernelGroup:
        table, size, count = self._tables[group], self._size, plan.num_decode_rows
        decode, chunks = None, []
        slots = [np.empty(0, dtype=np.int64)]
        if count:
            rows, at = np.array(_decode_rows(plan)[2]), positions[:count]
            slots.append(table[rows, at // size] * size + at % size)
            decode = self._table(table, rows, at)
        begin, own = count, [0]
        seen: list[Ints] = []
        for sequence, length in plan.chunks:
            end = sequence.computed + length
            first = max(0, sequence.computed - window + 1) if window else 0
            at = np.arange(first, end)
            pool_rows = table[sequence.slot][at // size] * size + at % size
            slots.append(pool_rows[sequence.computed - first :])
            if seen and sum(len(rows) for rows in seen) + len(at) > self._most_seen:
                chunks.append(self._packed(begin, own, seen))
                begin, own, seen = begin + own[-1], [0], []
            own.append(own[-1] + length)
            seen.append(pool_rows)
        if seen:
            chunks.append(self._packed(begin, own, seen))
        return KernelGroup(self._tensor(np.concatenate(slots)), decode, chunks, window)

    def _table(self, table: Ints, rows: Ints, positions: Ints) -> DecodeTable:
        width = int(positions.max()) // self._size + 1
        lengths = (positions + 1).astype(np.int32)
        return DecodeTable(self._tensor(table[rows, :width].astype(np.int32)), self._tensor(lengths))

    def _packed(self, begin: int, own: list[int], seen: list[Ints]) -> PackedChunks:
        lengths = [len(rows) for rows in seen]
        return PackedChunks(
            begin,
            begin + own[-1],
            self._tensor(np.concatenate(seen)),
            self._tensor(np.array(own, dtype=np.int32)),
            self._tensor(np.cumsum([0, *lengths], dtype=np.int32)),
            longest_query=max(after - before for before, after in pairwise(own)),
            longest_key=max(lengths),
            is_fresh=sum(lengths) == own[-1],
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _decode_rows(plan: SchedulerOutput) -> tuple[list[int], list[int], list[int]]:
    """Return ids, positions and batch rows of the step's decode rows, those of drafts last."""
    decodes = plan.decodes
    ids = [sequence.tokens[-1] for sequence in decodes]
    positions = [sequence.computed for sequence in decodes]
    rows = [sequence.slot for sequence in decodes]
    for sequence, drafts in plan.drafts.items():
        first, count = sequence.computed + 1, len(drafts)
        ids += drafts
        positions += range(first, first + count)
        rows += [sequence.slot] * count
    return ids, positions, rows


def _embeddings(plan: SchedulerOutput) -> list[tuple[int, Tensor]]:
    """Return the embeddings of pictures in the step's chunks, and their places in it."""
    found, begin = [], plan.num_decode_rows
    for sequence, count in plan.chunks:
        if sequence.pictures is not None:
            first = sequence.computed
            rows = sequence.pictures.rows_in(first, first + count)
            found += [(begin + at - first, tensor) for at, tensor in rows]
        begin += count
    return found


def _logits_rows(plan: SchedulerOutput) -> tuple[list[Sequence], list[int], list[PromptRows]]:
    """Return the sequences to sample, the tokens whose logits are wanted, and which of these are for prompts."""
    sampled = list(plan.decodes)
    rows = list(range(len(sampled)))
    wanted: list[tuple[Sequence, int, list[int]]] = []
    begin = plan.num_decode_rows
    drafts = range(len(sampled), begin)
    for sequence, count in plan.chunks:
        if sequence.computed + count == len(sequence.tokens):
            sampled.append(sequence)
            rows.append(begin + count - 1)
        if sequence.wants_prompt_logprobs:
            next_ids = sequence.tokens[sequence.computed + 1 : min(sequence.computed + count + 1, sequence.num_prompt)]
            wanted.append((sequence, begin, next_ids))
        begin += count
    rows += drafts
    prompt_rows = []
    for sequence, first, next_ids in wanted:
        prompt_rows.append(PromptRows(sequence, len(rows), next_ids))
        rows += range(first, first + len(next_ids))
    return sampled, rows, prompt_rows
