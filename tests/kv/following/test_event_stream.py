"""A reader's view of one rank's events, whatever the way there does to them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bireme.kv.following.event_stream import ANSWER_TIMEOUT_S, STALE_S, KvEventStream
from bireme.kv.kernels.event_columns import REMOVE, STORE
from bireme.kv.wire.event_reading import read_batch
from bireme.kv.wire.event_wire import (
    END,
    SNAPSHOT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode_payload,
)


class Reader:
    """A stream, what it believes, and a clock that is turned by hand."""

    def __init__(self):
        self.now, self.held, self.counted = 100.0, set(), Counter()
        self.stream = KvEventStream(self._apply, self._count, lambda: self.now)

    def _apply(self, changes):
        for kind, _, first, end, _ in changes.rows[changes.first : changes.end].tolist():
            hashes = changes.hashes[first:end].tolist()
            if kind == STORE:
                self.held.update(hashes)
            else:
                self.held.difference_update(hashes if kind == REMOVE else set(self.held))

    def _count(self, what, amount):
        self.counted[what] += amount

    def answer(self, *parts):
        for seq, batch in parts:
            self.stream.take_answer(seq, batch)
        self.stream.take_answer(END, None)

    def ask(self):
        self.now += 1.0  # longer than the first pauses
        return self.stream.question()


def read(ts, events, rank=0):
    return read_batch(encode_payload(EventBatch(ts, events, rank)))


def stored(*hashes):
    return [BlockStored([value], None, [], 4) for value in hashes]


def batch(*hashes, ts=1.0):
    return read(ts, stored(*hashes))


def snapshot(*hashes, ts=1.0):
    return read(ts, [AllBlocksCleared(), *stored(*hashes)])


@pytest.fixture
def reader():
    """Return a reader in step that has taken a snapshot of blocks 1 and 2, up to batch 7."""
    reader = Reader()
    assert reader.stream.question() == SNAPSHOT
    reader.answer((7, snapshot(1)), (7, batch(2)))
    assert reader.stream.is_in_step and reader.held == {1, 2}
    return reader


def test_batches_in_order_are_taken(reader):
    reader.stream.take(8, batch(3))
    reader.stream.take(9, read(1.0, [BlockRemoved([1])], 0))
    assert reader.held == {2, 3} and reader.stream.question() is None


def test_what_comes_twice_or_late_changes_nothing(reader):
    reader.stream.take(8, read(1.0, [BlockRemoved([1])], 0))
    reader.stream.take(7, batch(1))
    reader.stream.take(8, batch(1))
    assert reader.held == {2} and reader.counted["repeated"] == 2


def test_a_gap_is_asked_for_and_what_came_after_it_waits(reader):
    reader.stream.take(10, batch(5))
    assert reader.held == {1, 2} and reader.ask() == 8 and reader.counted["gaps"] == 2
    reader.stream.take(11, batch(6))
    reader.answer((8, batch(3)), (9, batch(4)), (10, batch(5)))
    assert reader.held == {1, 2, 3, 4, 5, 6} and reader.stream.is_in_step


def test_batches_that_changed_places_are_taken_in_their_order(reader):
    reader.stream.take(9, read(1.0, [BlockRemoved([3])], 0))
    reader.ask()
    reader.stream.take(8, batch(3))
    reader.answer((8, batch(3)), (9, read(1.0, [BlockRemoved([3])], 0)))
    assert reader.held == {1, 2}


def test_what_is_no_longer_kept_is_replaced_by_a_snapshot(reader):
    reader.stream.take(50, batch(5))
    assert reader.ask() == 8
    reader.answer((52, snapshot(4)), (52, batch(5)))
    assert reader.held == {4, 5}
    reader.stream.take(53, batch(6))
    assert reader.held == {4, 5, 6}


def test_a_gap_behind_an_answer_is_asked_for_again(reader):
    reader.stream.take(9, batch(4))
    reader.ask()
    reader.stream.take(12, batch(6))
    reader.answer((8, batch(3)), (9, batch(4)))
    assert not reader.stream.is_in_step and reader.ask() == 10


def test_a_sequence_that_begins_again_is_another_life(reader):
    reader.stream.take(3, batch(9, ts=2.0))
    assert reader.held == set() and reader.ask() == SNAPSHOT
    reader.answer((3, snapshot(9, ts=2.0)))
    assert reader.held == {9} and reader.counted["dead_life"] == 1


def test_an_answer_that_does_not_come_is_asked_for_again_and_then_nothing_is_believed(reader):
    reader.stream.take(9, batch(4))
    assert reader.ask() == 8 and reader.stream.question() is None
    reader.now += ANSWER_TIMEOUT_S + 0.1
    assert reader.stream.question() == 8
    reader.now += STALE_S
    assert reader.stream.question() == SNAPSHOT and reader.held == set()


def test_a_lost_last_batch_is_noticed_by_the_report_that_names_the_next(reader):
    reader.stream.take_next_seq(9)
    assert reader.stream.question() is None  # it may still be on its way
    assert reader.ask() == 8


def test_a_report_that_overtakes_its_batches_is_no_gap(reader):
    reader.stream.take_next_seq(9)
    reader.stream.take(8, batch(3))
    assert reader.ask() is None and not reader.counted["gaps"]


def test_what_can_not_be_read_is_replaced_by_a_snapshot(reader):
    reader.stream.take_malformed()
    assert reader.ask() == SNAPSHOT
    reader.stream.take_answer(8, None)
    assert reader.ask() == SNAPSHOT and reader.counted["malformed"] == 2


def test_an_answer_that_breaks_the_rules_is_thrown_away(reader):
    reader.stream.take(10, batch(5))
    reader.ask()
    reader.answer((9, batch(4)))
    assert reader.counted["malformed"] == 1 and reader.ask() == SNAPSHOT


def test_an_answer_nobody_asked_for_changes_nothing(reader):
    reader.answer((9, snapshot(77)))
    assert reader.held == {1, 2} and reader.counted["stray"] == 2


def test_a_rank_that_has_published_nothing_holds_nothing():
    reader = Reader()
    reader.stream.question()
    reader.answer()
    reader.stream.take(0, batch(1))
    assert reader.held == {1} and reader.stream.is_in_step


def test_questions_that_follow_each_other_become_rarer(reader):
    asked = 0
    for _ in range(1000):
        reader.stream.take_malformed()
        reader.now += 0.01
        asked += reader.stream.question() is not None
    assert asked < 12


class Publisher:
    """A publisher by the rules, of blocks that come and go; its life can end and another begin."""

    def __init__(self, kept):
        self._kept, self.life_began = kept, 0.0
        self.restart(0.0)

    def restart(self, ts):
        self.held, self.sent, self.ts = set(), [], ts
        return self._send([AllBlocksCleared()], ts)

    def change(self, value, ts):
        event = BlockRemoved([value]) if value in self.held else BlockStored([value], None, [], 4)
        self.held ^= {value}
        return self._send([event], ts)

    def _send(self, events, ts):
        self.sent.append(read(ts, events, 0))
        return len(self.sent) - 1, self.sent[-1]

    def answer(self, start):
        if max(0, len(self.sent) - self._kept) <= start <= len(self.sent):
            return list(enumerate(self.sent))[start:]
        return [(len(self.sent) - 1, snapshot(*sorted(self.held), ts=self.sent[-1].ts))]


@pytest.mark.parametrize("seed", range(50))
def test_whatever_is_lost_repeated_or_mixed_up_the_reader_ends_with_the_truth(seed):
    """1,000 changes; messages are lost, doubled and reordered, answers lost whole, publishers restarted."""
    chance, reader, publisher = random.Random(seed), Reader(), Publisher(kept=20)
    on_their_way = []
    for _ in range(1000):
        reader.now += 0.02
        restarts = chance.random() < 0.005
        message = publisher.restart(reader.now) if restarts else publisher.change(chance.randrange(30), reader.now)
        on_their_way += [message] * chance.choice([0, 1, 1, 1, 1, 2])
        if chance.random() < 0.2:
            chance.shuffle(on_their_way)
        while on_their_way and chance.random() < 0.7:
            reader.stream.take(*on_their_way.pop(0))
        _settle(reader, publisher, lost=chance.random() < 0.3)
    on_their_way.clear()
    for _ in range(1000):
        reader.now += 0.1
        reader.stream.take_next_seq(len(publisher.sent))
        reader.stream.take(*publisher.change(31, reader.now))
        _settle(reader, publisher, lost=False)
    assert reader.stream.is_in_step and reader.held == publisher.held


def _settle(reader, publisher, lost):
    start = reader.stream.question()
    if start is not None and not lost:
        reader.answer(*publisher.answer(start))
