"""Blocks in several tiers: what lies where stays true whatever order copies, evictions and requests come in."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from bireme.kv.blocks.block_manager import BlockManager, GroupSpec
from bireme.kv.blocks.block_pool import NULL, BlockPool, Retention
from bireme.kv.blocks.block_tiers import CopyResult
from bireme.kv.blocks.events import DEVICE, DISK, HOST, BlocksMoved, BlocksRemoved, BlocksStored, EventBuffer
from tests.kv.blocks.block_tables import BlockTables
from tests.kv.blocks.naive_cache import NaiveCache

SIZE = 4


def manager(*blocks, window=0, events=None, margin=100):
    """`blocks`: of each tier, the device's first."""
    groups = [GroupSpec(0, blocks[0], blocks[1:])]
    groups += [GroupSpec(window, blocks[0], blocks[1:])] if window else []
    return BlockManager(groups, SIZE, model="m", events=events, margin=margin)


def copy_all(blocks):
    """Make all copies at once."""
    while copies := blocks.tiers.offload():
        blocks.tiers.offloaded(copies, [CopyResult.DONE] * len(copies))


def run(blocks, tokens, retention=None):
    """Serve a request whole; return the tokens that it found, by tier."""
    table = blocks.open(retention=retention)
    matched = blocks.match(table, tokens, len(tokens) - 1)
    found = {tier: count for tier, count in table.matched.items() if count}
    assert blocks.reserve(table, blocks.worst_case(len(tokens), len(tokens)))
    if copies := blocks.onboard(table):
        blocks.onboarded(table, copies, [CopyResult.DONE] * len(copies))
    blocks.grow(table, len(tokens), matched)
    blocks.commit(table, tokens, len(tokens))
    blocks.release(table)
    copy_all(blocks)
    return found


def prompt(number, length=9):
    return [number * 100 + at for at in range(length)]


def test_an_evicted_block_is_found_in_host_memory_and_comes_back():
    blocks = manager(4, 8)
    assert run(blocks, prompt(1)) == {}
    for number in (2, 3):
        run(blocks, prompt(number))
    assert run(blocks, prompt(1)) == {HOST: 2}
    assert run(blocks, prompt(1)) == {DEVICE: 2}


def test_what_a_head_has_seen_stays_so_through_the_tiers_and_ends_with_the_block():
    blocks = manager(4, 8)
    host, device = (blocks.tiers.pools[tier][0] for tier in (HOST, DEVICE))
    table = blocks.open()
    blocks.grow(table, 9, 0)
    device.set_seen(table.blocks[0][1])
    blocks.commit(table, prompt(1), 9)
    hashes = list(table.hashes)
    blocks.release(table)
    copy_all(blocks)
    for number in (2, 3):
        run(blocks, prompt(number))
    assert [host.is_seen(host.lookup(digest)) for digest in hashes] == [False, True]
    assert not any(device.is_seen(block) for block in range(1, 5))
    assert run(blocks, prompt(1)) == {HOST: 2}
    assert [device.is_seen(device.lookup(digest)) for digest in hashes] == [False, True]


def test_what_falls_out_of_host_memory_is_found_on_disk():
    blocks = manager(4, 8, 20)
    for number in range(1, 8):
        run(blocks, prompt(number))
    assert run(blocks, prompt(1)) == {DISK: 2}


def test_nothing_is_copied_while_there_is_room_for_the_next_steps():
    blocks = manager(20, 8, margin=4)
    for number in range(1, 8):
        run(blocks, prompt(number))
    assert blocks.tiers.counts.offloaded.total() == 0
    run(blocks, prompt(8, 13))  # three are free now
    assert blocks.tiers.counts.offloaded == {(HOST, 0): 1}


def test_a_copy_whose_source_was_evicted_meanwhile_is_thrown_away():
    blocks = manager(3, 8)
    table = blocks.open()
    blocks.grow(table, 12, 0)
    blocks.commit(table, prompt(1, 12), 12)
    blocks.release(table)
    copies = blocks.tiers.offload()
    other = blocks.open()
    blocks.grow(other, 12, 0)
    blocks.tiers.offloaded(copies, [CopyResult.DONE] * 3)
    assert blocks.tiers.pools[HOST][0].num_available == 8 and blocks.tiers.pools[HOST][0].num_cached == 0
    assert blocks.tiers.counts.missed == {(HOST, 0): 3}


def test_a_tier_that_could_not_be_written_is_left_alone_for_a_while():
    now = [0.0]
    blocks = manager(4, 8)
    blocks.tiers._clock = lambda: now[0]
    table = blocks.open()
    blocks.grow(table, 4, 0)
    blocks.commit(table, prompt(1, 4), 4)
    blocks.release(table)
    blocks.tiers.offloaded(blocks.tiers.offload(), [CopyResult.FAILED])
    assert blocks.tiers.offload() == []
    now[0] = 11.0
    assert len(blocks.tiers.offload()) == 1


def test_a_block_that_comes_back_damaged_is_forgotten_in_its_tier():
    events = EventBuffer(100)
    blocks = manager(4, 8, events=events)
    for number in (1, 2, 3):
        run(blocks, prompt(number))
    table = blocks.open()
    assert blocks.match(table, prompt(1), 8) == 8 and blocks.reserve(table, [3])
    copies = blocks.onboard(table)
    events.drain()
    blocks.onboarded(table, copies, [CopyResult.FAILED, CopyResult.DONE])
    removed, moved = events.drain()
    assert isinstance(removed, BlocksRemoved) and isinstance(moved, BlocksMoved)
    blocks.release(table)
    assert blocks.match(blocks.open(), prompt(1), 8) == 0


def test_readers_are_told_of_a_block_in_the_highest_tier_that_has_it():
    events = EventBuffer(1000)
    blocks = manager(4, 8, 20, events=events)
    for number in range(1, 8):
        run(blocks, prompt(number))
    held = replay(events.drain())
    assert Counter(held.values()).keys() == {DEVICE, HOST, DISK} and len(held) == 14
    on_device = set(blocks.pools[0]._event_hashes.values())
    assert {value for value, tier in held.items() if tier == DEVICE} == on_device
    run(blocks, prompt(1))
    held = replay(events.drain(), held)
    assert {value for value, tier in held.items() if tier == DEVICE} == set(blocks.pools[0]._event_hashes.values())


def replay(events, held=None):
    held = dict(held or {})
    for event in events:
        if isinstance(event, BlocksStored):
            assert not {block.block_hash for block in event.blocks} & held.keys(), "stored twice"
            held |= {block.block_hash: DEVICE for block in event.blocks}
        elif isinstance(event, BlocksMoved):
            assert all(held[value] != event.tier for value in event.block_hashes)
            held |= dict.fromkeys(event.block_hashes, event.tier)
        else:
            for value in event.block_hashes:
                del held[value]
    return held


def test_blocks_of_low_priority_are_not_copied_and_go_first():
    blocks = manager(6, 8)
    run(blocks, prompt(1), lambda index: Retention(10))
    run(blocks, prompt(2))
    run(blocks, prompt(3, 13))  # one block must go: of the low ones
    assert run(blocks, prompt(2)) == {DEVICE: 2}
    assert run(blocks, prompt(1)).get(HOST) is None
    assert blocks.tiers.counts.missed == {}


def test_a_priority_with_a_duration_falls_back_when_that_has_passed():
    now = [0.0]
    pool = BlockPool(2, clock=lambda: now[0])
    for digest, retention in ((b"kept", Retention(90, 5.0)), (b"usual", Retention())):
        block = pool.allocate()
        pool.commit(block, digest, None)
        pool.retain(block, retention)
        pool.free(block)
    kept, usual = pool.lookup(b"kept"), pool.lookup(b"usual")
    assert list(pool.eviction_order()) == [usual, kept]
    now[0] = 5.0
    assert list(pool.eviction_order()) == [usual, kept] and pool.retention(kept).priority == 35
    pool.touch(usual)
    assert list(pool.eviction_order()) == [kept, usual]


def test_a_use_in_time_starts_the_duration_again():
    now = [0.0]
    pool = BlockPool(1, clock=lambda: now[0])
    block = pool.allocate()
    pool.commit(block, b"1", None)
    pool.retain(block, Retention(90, 5.0))
    pool.free(block)
    now[0] = 4.0
    pool.share(block)
    pool.free(block)
    now[0] = 8.0
    list(pool.eviction_order())
    assert pool.retention(block).priority == 90
    now[0] = 9.0
    list(pool.eviction_order())
    assert pool.retention(block).priority == 35


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_where_is_what_a_naive_cache_finds(seed):
    """Host memory that holds the whole device, so that its copies never compete with what was evicted."""
    draw = random.Random(seed)
    sizes = draw.randrange(8, 16), draw.randrange(40, 60)
    blocks, naive = manager(*sizes), NaiveCache(*sizes, SIZE)
    for _ in range(150):
        begin = draw.randrange(8)
        tokens = [*prompt(begin, draw.choice([8, 12, 16])), *prompt(50 + draw.randrange(4), draw.randrange(1, 9))]
        assert run(blocks, tokens) == naive.run(tokens)


class Memory(BlockTables):
    """What each block holds, as if it were copied: at any time between the order to copy and its end."""

    def __init__(self):
        self.events = EventBuffer(100_000)
        super().__init__(manager(9, 5, 6, window=6, events=self.events, margin=6))
        self.content = {}  # (tier, group, block) -> digest
        self.ordered = []  # copies that have not been made
        self.made = []
        self.coming = []  # (table, tokens, matched, copies)
        self.held = {}

    @rule(start=st.integers(0, 3), length=st.integers(1, 24))
    def arrive(self, start, length):
        tokens = list(range(start, start + length))
        table = self.blocks.open()
        matched = self.blocks.match(table, tokens, length - 1)
        is_refused = not self.blocks.reserve(table, self.blocks.worst_case(length, 7))
        if is_refused or self.blocks.is_coming(table):
            self.blocks.release(table)
        elif copies := self.blocks.onboard(table):
            self.coming.append((table, tokens, matched, copies))
        else:
            self.check(table, matched)
            self.live.append((table, tokens, matched))

    @precondition(lambda self: self.coming)
    @rule(pick=st.integers(0, 100), is_whole=st.booleans(), is_over=st.booleans())
    def bring(self, pick, is_whole, is_over):
        table, tokens, matched, copies = self.coming.pop(pick % len(self.coming))
        for copy in copies:
            source = self.content[copy.source_tier, copy.group, copy.source]
            assert source == copy.digest, "another block has taken the place of one that is being read"
            self.content[DEVICE, copy.group, copy.target] = source
        results = [CopyResult.DONE] * (len(copies) - 1) + [CopyResult.DONE if is_whole else CopyResult.FAILED]
        if not is_whole:
            self.content[DEVICE, copies[-1].group, copies[-1].target] = "void"
        self.blocks.onboarded(table, copies, results)
        if is_over or not is_whole:
            self.blocks.release(table)
        else:
            self.check(table, matched)
            self.live.append((table, tokens, matched))

    def write(self, table, tokens, start, end):
        self.blocks._hash(table, tokens, len(tokens) // SIZE)
        for group, held in enumerate(table.blocks):
            for index in range(start // SIZE, -(-end // SIZE)):
                is_full = (index + 1) * SIZE <= end
                self.content[DEVICE, group, held[index]] = table.hashes[index] if is_full else "partial"

    @rule()
    def order_copies(self):
        self.ordered += self.blocks.tiers.offload()

    @precondition(lambda self: self.ordered)
    @rule(pick=st.integers(0, 100))
    def copy(self, pick):
        made = self.ordered.pop(pick % len(self.ordered))
        source = self.content.get((made.source_tier, made.group, made.source))
        self.content[made.target_tier, made.group, made.target] = source
        self.made.append(made)

    @precondition(lambda self: self.made)
    @rule(pick=st.integers(0, 100), result=st.sampled_from(list(CopyResult)))
    def end_copy(self, pick, result):
        self.blocks.tiers.offloaded([self.made.pop(pick % len(self.made))], [result])
        self.blocks.tiers._paused_until = [0.0, 0.0, 0.0]

    def check(self, table, matched):
        """A request finds what it was told that it finds."""
        for group, held in enumerate(table.blocks):
            for index in range(self.blocks.first_visible(group, matched) // SIZE, matched // SIZE):
                assert self.content[DEVICE, group, held[index]] == table.hashes[index]

    @invariant()
    def a_block_holds_what_its_hash_says(self):
        for tier, pools in enumerate(self.blocks.tiers.pools):
            for group, pool in enumerate(pools):
                for block, digest in pool._hashes.items():
                    assert self.content[tier, group, block] == digest

    @invariant()
    def references_are_those_of_tables_and_copies(self):
        counts = Counter()
        for table in [one[0] for one in (*self.live, *self.coming)]:
            for group, held in enumerate(table.blocks):
                counts.update((DEVICE, group, block) for block in held if block != NULL)
        counts.update((copy.target_tier, copy.group, copy.target) for copy in (*self.ordered, *self.made))
        for _, _, _, copies in self.coming:
            counts.update((copy.source_tier, copy.group, copy.source) for copy in copies)
        for tier, pools in enumerate(self.blocks.tiers.pools):
            for group, pool in enumerate(pools):
                held = {block: pool._references[block] for block in range(1, pool.num_blocks + 1)}
                assert {block: count for block, count in held.items() if count} == {
                    block: count for (at, of, block), count in counts.items() if (at, of) == (tier, group)
                }
                assert pool.num_available + pool.num_referenced == pool.num_blocks

    @invariant()
    def events_tell_the_highest_tier_of_each_block(self):
        self.held = replay(self.events.drain(), self.held)
        told = {}
        for tier, pools in reversed(list(enumerate(self.blocks.tiers.pools))):
            told |= dict.fromkeys(pools[0]._event_hashes.values(), tier)
        assert self.held == told


Memory.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestMemory = Memory.TestCase


def test_retentions_with_a_duration_take_no_memory_for_each_use():
    pool = BlockPool(8)
    block = pool.allocate()
    pool.commit(block, b"shared", None)
    pool.retain(block, Retention(90, 3600.0))
    pool.free(block)
    for _ in range(1000):
        pool.share(block)
        pool.free(block)
    assert len(pool._due) < 100
