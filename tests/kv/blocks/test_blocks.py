"""Block pools and their manager: reuse, windows, reservations, events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from bireme.kv.blocks.block_manager import BlockManager, GroupSpec
from bireme.kv.blocks.block_pool import NULL, BlockPool
from bireme.kv.blocks.events import BlocksRemoved, BlocksStored, EventBuffer
from bireme.kv.blocks.hashing import sequence_hashes
from tests.kv.blocks.block_tables import BlockTables

SIZE = 4


def manager(full=16, window=0, windowed=16, events=None):
    groups = [GroupSpec(0, full)] + ([GroupSpec(window, windowed)] if window else [])
    return BlockManager(groups, SIZE, model="m", events=events)


def run(blocks, tokens, salt=""):
    """Match, then compute the rest in one chunk."""
    table = blocks.open(cache_salt=salt)
    matched = blocks.match(table, tokens, len(tokens) - 1)
    blocks.grow(table, len(tokens), matched)
    blocks.commit(table, tokens, len(tokens))
    blocks.slide(table, len(tokens))
    return table, matched


def test_a_freed_block_without_hash_is_free_again():
    pool = BlockPool(2)
    block = pool.allocate()
    assert block != NULL
    pool.free(block)
    assert (pool.num_available, pool.num_cached, pool.num_referenced) == (2, 0, 0)


def test_the_least_recently_used_cached_block_goes_first():
    gone: list[int] = []
    pool = BlockPool(2, lambda block, digest, event_hash: gone.append(event_hash))
    first, second = pool.allocate(), pool.allocate()
    pool.commit(first, b"1", 1)
    pool.commit(second, b"2", 2)
    pool.free(second)
    pool.free(first)
    assert pool.allocate() == second and gone == [2]
    assert pool.lookup(b"2") is None and pool.lookup(b"1") == first


def test_a_block_freed_twice_is_a_defect():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block)


def test_a_second_request_takes_the_prefix_of_the_first():
    blocks = manager()
    tokens = list(range(18))
    first, matched = run(blocks, tokens)
    assert matched == 0
    second, matched = run(blocks, [*tokens[:13], 99, 98, 97])
    assert matched == 12
    assert second.blocks[0][:3] == first.blocks[0][:3]
    assert blocks.pools[0]._references[first.blocks[0][0]] == 2


def test_the_last_token_is_never_matched():
    blocks = manager()
    run(blocks, list(range(16)))
    assert run(blocks, list(range(16)))[1] == 12


def test_another_salt_shares_nothing():
    blocks = manager()
    run(blocks, list(range(16)), "a")
    assert run(blocks, list(range(16)), "b")[1] == 0


def test_blocks_that_slid_out_are_freed_and_stay_cached():
    blocks = manager(window=6)
    table, _ = run(blocks, list(range(17)))
    assert table.num_held(0) == 5
    assert table.blocks[1][:3] == [NULL] * 3 and table.num_held(1) == 2
    assert blocks.pools[1].num_cached == 3


def test_a_prefix_hit_needs_only_the_visible_blocks_of_a_window():
    blocks = manager(window=6, windowed=5)
    table, _ = run(blocks, list(range(17)))
    blocks.release(table)
    waste = blocks.open()
    blocks.grow(waste, 8, 0)  # evicts from the window's pool, deepest blocks last
    again = blocks.open()
    matched = blocks.match(again, list(range(17)), 16)
    assert matched == 16
    assert again.blocks[1][:2] == [NULL] * 2 and again.num_held(1) == 2


def test_a_prefix_whose_window_blocks_are_gone_is_cut_back():
    blocks = manager(window=6, windowed=5)
    table, _ = run(blocks, list(range(17)))
    blocks.release(table)
    waste = blocks.open()
    blocks.grow(waste, 20, 0)
    assert blocks.match(blocks.open(), list(range(17)), 16) == 0


def test_a_reservation_counts_as_taken():
    blocks = manager(full=4)
    holder, other = blocks.open(), blocks.open()
    assert blocks.reserve(holder, [3])
    assert not blocks.reserve(other, [2]) and blocks.reserve(other, [1])
    assert blocks.can_grow(holder, 12, 0)
    assert not blocks.can_grow(other, 8, 0)
    blocks.release(holder)
    assert blocks.can_grow(other, 16, 0)


def test_a_settled_table_keeps_its_blocks_and_promises_nothing():
    blocks = manager(full=4)
    table, other = blocks.open(), blocks.open()
    blocks.reserve(table, [4])
    blocks.grow(table, 4, 0)
    blocks.settle(table)
    assert blocks.reserve(other, [3]) and blocks.num_referenced == 1


def test_the_worst_case_of_a_window_is_its_width_and_a_chunk():
    blocks = manager(window=6)
    assert blocks.worst_case(100, 8) == [25, 5]
    assert blocks.worst_case(3, 8) == [1, 1]


def test_events_name_public_hashes_parents_and_tokens():
    events = EventBuffer(10)
    blocks = manager(events=events)
    tokens = list(range(12))
    table = blocks.open()
    blocks.grow(table, 12, 0)
    blocks.commit(table, tokens, 4)
    blocks.commit(table, tokens, 12)
    first, second = events.drain()
    hashes = sequence_hashes(tokens, SIZE)
    assert isinstance(first, BlocksStored) and isinstance(second, BlocksStored)
    assert (first.event_id, first.parent_hash, second.parent_hash) == (0, None, hashes[0])
    assert [block.block_hash for block in (*first.blocks, *second.blocks)] == hashes
    assert second.blocks[1].tokens == (8, 9, 10, 11)


def test_only_blocks_of_the_widest_window_have_events():
    events = EventBuffer(100)
    blocks = BlockManager([GroupSpec(4, 16), GroupSpec(8, 16), GroupSpec(6, 16)], SIZE, events=events)
    table, _ = run(blocks, list(range(24)))
    stored = [block.block_hash for event in events.drain() for block in event.blocks]
    assert stored == sequence_hashes(range(24), SIZE)
    assert all(not blocks.pools[group]._event_hashes for group in (0, 2))


def test_a_full_event_buffer_drops_the_oldest_and_the_ids_tell():
    events = EventBuffer(2)
    for block_hash in range(5):
        events.removed(block_hash)
    assert [event.event_id for event in events.drain()] == [3, 4]
    assert events.drain() == []


class Traffic(BlockTables):
    """Requests come, compute in chunks, decode and go; blocks stay accounted for whatever the order."""

    def __init__(self):
        self.events = EventBuffer(100_000)
        super().__init__(manager(full=12, window=6, windowed=9, events=self.events))
        self.held: set[int] = set()

    @rule(start=st.integers(0, 2), length=st.integers(1, 30))
    def arrive(self, start, length):
        tokens = list(range(start, start + length))
        table = self.blocks.open()
        matched = self.blocks.match(table, tokens, length - 1)
        assert matched % SIZE == 0 and matched < length
        if not self.blocks.reserve(table, self.blocks.worst_case(length, 7)):
            self.blocks.release(table)
            return
        self.live.append((table, tokens, matched))

    @invariant()
    def references_are_those_of_the_tables(self):
        for group, pool in enumerate(self.blocks.pools):
            counts: dict[int, int] = {}
            for table, _, _ in self.live:
                assert all(block == NULL for block in table.blocks[group][: table.first[group]])
                for block in table.blocks[group][table.first[group] :]:
                    assert block != NULL
                    counts[block] = counts.get(block, 0) + 1
            assert all(pool._references[block] == count for block, count in counts.items())
            assert pool.num_referenced == len(counts)
            assert pool.num_available + pool.num_referenced == pool.num_blocks

    @invariant()
    def visible_tokens_have_blocks(self):
        for table, _, computed in self.live:
            for group in range(2):
                first = self.blocks.first_visible(group, computed) // SIZE
                assert table.first[group] <= first
                assert len(table.blocks[group]) * SIZE >= computed

    @invariant()
    def what_is_promised_is_what_tables_may_claim(self):
        assert self.blocks._promised == [
            sum(table.claim(group) - table.num_held(group) for table, _, _ in self.live) for group in range(2)
        ]

    @invariant()
    def events_replayed_give_the_held_set(self):
        for event in self.events.drain():
            if isinstance(event, BlocksRemoved):
                self.held.difference_update(event.block_hashes)
            else:
                self.held.update(block.block_hash for block in event.blocks)
        assert self.held == set(self.blocks.pools[0]._event_hashes.values())


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
