"""What a step's tensors say, for kernels that read the pools where they are."""

from __future__ import annotations

import pytest
import torch

from bireme.engines.torch.forward.batch import BatchBuilder
from bireme.engines.torch.step import SchedulerOutput, Sequence
from bireme.kv.blocks.block_manager import BlockManager, GroupSpec
from bireme.messages import EngineRequest, SamplingParams

WINDOW = 6


@pytest.fixture
def manager():
    return BlockManager([GroupSpec(0, 40), GroupSpec(WINDOW, 40)], 4, model="m")


def sequence(manager, slot, computed, count):
    request = EngineRequest(prompt=b"", sampling=SamplingParams())
    tokens = list(range(computed + count))
    made = Sequence((0, slot), request, tokens, len(tokens), 1, frozenset(), 0.0, manager.open())
    made.slot, made.mirrored, made.computed = slot, [0, 0], computed
    manager.grow(made.table, len(tokens), 0)
    return made


def build(manager, max_seq_len, decodes=(), chunks=()):
    windows = [group.window for group in manager.groups]
    builder = BatchBuilder(windows, 4, 8, max_seq_len, torch.device("cpu"), uses_kernels=True)
    return builder.build(SchedulerOutput(list(decodes), list(chunks)))


def rows(manager, made, first, last):
    blocks = made.table.blocks[0]
    return [blocks[at // 4] * 4 + at % 4 for at in range(first, last)]


def test_decode_rows_have_their_block_tables_and_lengths(manager):
    decodes = [sequence(manager, 0, 9, 1), sequence(manager, 1, 2, 1)]
    batch = build(manager, 64, decodes)
    view = batch.groups[0].decode
    assert view.lengths.tolist() == [10, 3] and view.blocks.dtype == torch.int32
    assert view.blocks[0].tolist() == decodes[0].table.blocks[0] and view.blocks.shape == (2, 3)
    assert batch.groups[0].slots.tolist() == rows(manager, decodes[0], 9, 10) + rows(manager, decodes[1], 2, 3)
    assert batch.is_decode and batch.num_decodes == 2 and batch.groups[0].chunks == []


def test_chunks_are_packed_with_what_they_see(manager):
    fresh, behind = sequence(manager, 0, 0, 5), sequence(manager, 1, 8, 4)
    full, windowed = build(manager, 64, chunks=[(fresh, 5), (behind, 4)]).groups
    (packed,) = full.chunks
    assert packed.rows.tolist() == rows(manager, fresh, 0, 5) + rows(manager, behind, 0, 12)
    assert (packed.query_begins.tolist(), packed.key_begins.tolist()) == ([0, 5, 9], [0, 5, 17])
    assert (packed.longest_query, packed.longest_key, packed.is_fresh) == (5, 12, False)
    assert windowed.chunks[0].key_begins.tolist() == [0, 5, 5 + WINDOW - 1 + 4]
    assert full.slots.tolist() == rows(manager, fresh, 0, 5) + rows(manager, behind, 8, 12)


def test_no_more_is_gathered_at_once_than_the_longest_request(manager):
    decode = sequence(manager, 0, 3, 1)
    chunks = [(sequence(manager, 1, 8, 4), 4), (sequence(manager, 2, 4, 2), 2), (sequence(manager, 3, 12, 3), 3)]
    first, second = build(manager, 20, [decode], chunks).groups[0].chunks
    assert ((first.begin, first.end), (second.begin, second.end)) == ((1, 7), (7, 10))
    assert second.query_begins.tolist() == [0, 3] and second.key_begins.tolist() == [0, 15]


def test_whole_prompts_are_seen_to_need_no_gathering(manager):
    (packed,) = build(manager, 64, chunks=[(sequence(manager, 0, 0, 5), 5)]).groups[0].chunks
    assert packed.is_fresh
