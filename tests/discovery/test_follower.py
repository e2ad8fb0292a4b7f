"""A store that is followed, and one that is written to, through outages."""

import time

import pytest

from bireme.discovery.follower import Follower
from bireme.discovery.registration import Registration
from tests.discovery.conftest import MemoryStore, by_id, record


@pytest.fixture
def followed():
    store, views = MemoryStore(), []
    follower = Follower(store, 0.3, views.append)
    yield store, follower, views
    follower.stop()


def test_every_change_is_told_with_the_whole_view(followed, until):
    store, follower, views = followed
    store.change(record())
    follower.start()
    until(lambda: views == [by_id(record())])
    store.change(record(), record("prefill"))
    until(lambda: views[-1] == by_id(record(), record("prefill")))
    assert not follower.problem


def test_the_last_view_stands_while_the_store_is_gone(followed, until):
    store, follower, views = followed
    store.change(record())
    follower.start()
    until(lambda: views)
    store.fail("etcd is gone")
    until(lambda: "etcd is gone" in follower.problem)
    assert follower.records == by_id(record()) and len(views) == 1


def test_a_store_that_comes_back_empty_takes_nobody_down_for_a_lease(followed, until):
    store, follower, views = followed
    store.change(record(), record("prefill"))
    follower.start()
    until(lambda: views)
    store.fail("etcd is gone")
    until(lambda: follower.problem)
    store.change(record())
    until(lambda: not follower.problem)
    assert len(follower.records) == 2
    store.change(record())
    until(lambda: follower.records == by_id(record()))


def test_a_record_is_held_again_and_again(until):
    store = MemoryStore()
    registration = Registration(store, 0.06)
    registration.set(record())
    until(lambda: len(store.held) > 3)
    registration.stop()
    assert store.records == {}


def test_a_change_is_written_at_once(until):
    store = MemoryStore()
    registration = Registration(store, 3600)
    registration.set(record())
    until(lambda: store.held)
    registration.set(record(state="draining"))
    until(lambda: store.held[-1].is_draining)
    registration.stop()


def test_a_record_is_written_when_the_store_is_back(until):
    store = MemoryStore()
    store.fail("etcd is gone")
    registration = Registration(store, 0.06)
    registration.set(record())
    until(lambda: registration.problem == "etcd is gone")
    store.change()
    until(lambda: store.held and not registration.problem)
    registration.stop()


def test_one_that_a_flapping_store_lacks_is_kept_for_one_lease_alone(until):
    store, views = MemoryStore(), []
    follower = Follower(store, 0.3, views.append)
    store.change(record(), record("prefill"))
    follower.read_now()
    store.change(record())
    began = time.monotonic()
    while len(follower.records) == 2:
        follower._note_failure("timed out")  # before each read that succeeds
        follower.read_now()
        assert time.monotonic() < began + 30, "it is kept for ever"
        time.sleep(0.01)
    assert time.monotonic() > began + 0.3 and follower.records == by_id(record())
    follower._note_failure("timed out")
    store.change(record(), record("prefill"))
    follower.read_now()
    assert len(follower.records) == 2
    follower.stop()
