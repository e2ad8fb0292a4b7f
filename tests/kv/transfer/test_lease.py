"""The lease table: each test by example, then any order of operations."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from bireme.errors import NotFoundError
from bireme.kv.transfer.lease import LIVE, LeaseState, LeaseTable

TIMEOUT_S = 10.0


class Table:
    """A lease table with a clock to set and releases that are counted."""

    def __init__(self):
        self.now = 0.0
        self.released: list[int] = []
        self.queue: list[Callable[[], None]] = []
        self.leases = LeaseTable(TIMEOUT_S, self.queue.append, clock=lambda: self.now)
        self.num_reserved = 0

    def reserve(self):
        self.num_reserved += 1
        number = self.num_reserved
        return self.leases.reserve(lambda: self.released.append(number))

    def exported(self):
        lease = self.reserve()
        lease.export(5, lambda *_: None)
        return lease

    def claimed(self):
        lease = self.exported()
        return self.leases.claim(lease.lease_id, lease.generation)

    def run(self):
        while self.queue:
            self.queue.pop(0)()
        return self.released


def test_a_lease_goes_from_reserved_to_acked_and_is_released_once():
    table = Table()
    lease = table.claimed()
    assert lease.begin_copy() is not None
    lease.end_copy()
    assert lease.ack() and not lease.ack()
    assert lease.state is LeaseState.ACKED
    assert table.run() == [1] and len(table.leases) == 0


def test_release_is_never_called_on_the_thread_that_ends_the_lease():
    table = Table()
    table.exported().abort()
    assert table.released == [] and table.run() == [1]


def test_an_abort_during_the_copy_releases_only_after_it():
    table = Table()
    lease = table.claimed()
    lease.begin_copy()
    lease.abort()
    assert table.run() == []
    lease.end_copy()
    assert table.run() == [1] and lease.state is LeaseState.ABORTED


def test_a_lease_that_has_ended_is_not_read():
    table = Table()
    lease = table.claimed()
    lease.abort()
    assert lease.begin_copy() is None


def test_export_after_an_abort_does_nothing():
    table = Table()
    lease = table.reserve()
    lease.abort()
    lease.export(5, lambda *_: None)
    assert lease.state is LeaseState.ABORTED


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda table, lease: lease.abort(), "was aborted"),
        (lambda table, lease: table.leases.claim(lease.lease_id, lease.generation), "was claimed before"),
        (lambda table, lease: table.leases.claim(lease.lease_id, lease.generation).ack(), "was used before"),
    ],
)
def test_a_claim_too_late_says_what_became_of_the_lease(end, text):
    table = Table()
    lease = table.exported()
    end(table, lease)
    with pytest.raises(NotFoundError, match=text):
        table.leases.claim(lease.lease_id, lease.generation)


def test_the_timer_starts_at_export_and_again_at_the_claim():
    table = Table()
    reserved, exported = table.reserve(), table.exported()
    table.now = 9.0
    claimed = table.claimed()
    table.now = 11.0
    (expired,) = table.leases.expire()
    assert expired.lease is exported and expired.was is LeaseState.EXPORTED
    table.now = 20.0
    (expired,) = table.leases.expire()
    assert expired.lease is claimed and expired.was is LeaseState.CLAIMED
    assert reserved.state is LeaseState.RESERVED


def test_ids_have_63_bits_and_generations_count():
    table = Table()
    leases = [table.reserve() for _ in range(1000)]
    assert len({lease.lease_id for lease in leases}) == 1000
    assert all(0 < lease.lease_id < 2**63 for lease in leases)
    assert max(lease.lease_id for lease in leases) > 2**60
    assert [lease.generation for lease in leases] == list(range(1, 1001))


def test_after_close_every_lease_is_aborted_also_new_ones():
    table = Table()
    leases = [table.reserve(), table.exported(), table.claimed()]
    table.leases.close()
    leases.append(table.reserve())
    assert {lease.state for lease in leases} == {LeaseState.ABORTED}
    assert sorted(table.run()) == [1, 2, 3, 4]


def test_racing_claims_have_one_winner():
    table = Table()
    for _ in range(50):
        lease, wins, gate = table.exported(), [], threading.Barrier(4)

        def claim(lease=lease, wins=wins, gate=gate):
            gate.wait()
            try:
                wins.append(table.leases.claim(lease.lease_id, lease.generation))
            except NotFoundError:
                pass

        threads = [threading.Thread(target=claim) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wins == [lease]


class LeaseMachine(RuleBasedStateMachine):
    """Any order of operations: states only move forward, release comes once and never during a copy."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.table = Table()
        self.numbers: dict[int, int] = {}  # lease id -> its number in `released`
        self.all = []
        self.copying = []

    @rule(target=leases)
    def reserve(self):
        lease = self.table.reserve()
        self.numbers[lease.lease_id] = self.table.num_reserved
        self.all.append(lease)
        return lease

    @rule(lease=leases)
    def export(self, lease):
        if lease.state is LeaseState.RESERVED or lease.state not in LIVE:
            lease.export(3, lambda *_: None)

    @rule(lease=leases, off=st.integers(0, 1))
    def claim(self, lease, off):
        may = lease.state is LeaseState.EXPORTED and not off
        try:
            self.table.leases.claim(lease.lease_id, lease.generation + off)
            assert may
        except NotFoundError:
            assert not may

    @rule(lease=leases)
    def begin_copy(self, lease):
        if lease not in self.copying and self.number(lease) not in self.table.released and not lease._is_copying:
            if lease._release is not None and lease.begin_copy() is not None:
                self.copying.append(lease)

    @rule(index=st.integers(0, 5))
    def end_copy(self, index):
        if index < len(self.copying):
            self.copying.pop(index).end_copy()

    @rule(lease=leases)
    def ack(self, lease):
        if lease.state is LeaseState.CLAIMED:
            assert lease.ack()

    @rule(lease=leases)
    def abort(self, lease):
        was = lease.state
        lease.abort()
        assert lease.state is (LeaseState.ABORTED if was in LIVE else was)

    @rule(lease=consumes(leases))
    def forget(self, lease):
        lease.abort()

    @rule(seconds=st.integers(1, 12))
    def pass_time(self, seconds):
        self.table.now += seconds
        self.table.leases.expire()

    def number(self, lease):
        return self.numbers[lease.lease_id]

    @invariant()
    def releases_are_right(self):
        released = self.table.run()
        assert len(released) == len(set(released))
        for lease in self.all:
            is_released = self.number(lease) in released
            if lease in self.copying:
                assert not is_released
            elif lease.state not in LIVE:
                assert is_released
            elif lease.state is not LeaseState.CLAIMED:
                assert not is_released

    @invariant()
    def counts_are_those_of_the_live_leases(self):
        counts = self.table.leases.counts()
        assert counts == {state: sum(lease.state is state for lease in self.all) for state in LIVE}
        assert len(self.table.leases) == sum(counts.values())


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
