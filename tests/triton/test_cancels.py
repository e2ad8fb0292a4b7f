"""The cancel poller: finds clients that left, forgets streams that ended, sleeps when idle."""

from __future__ import annotations

import threading

import pytest

from bireme.triton.cancels import CancelPoller
from bireme.triton.streams import Stream
from tests.triton.recording import Recorder


@pytest.fixture
def poller():
    poller = CancelPoller()
    yield poller
    poller.stop(5)


def watched(poller, outlet):
    stream = Stream(outlet, lambda stream: stream.flush(), is_decoupled=True, max_buffer_bytes=1000)
    found = threading.Event()
    stream.cancelled.on_set(found.set)
    poller.watch(stream)
    return stream, found


def test_a_client_that_left_is_found(poller):
    outlet = Recorder()
    outlet.gone = True
    _, found = watched(poller, outlet)
    assert found.wait(5)
    assert poller.take_num_cancelled() == 1
    assert poller.take_num_cancelled() == 0


def test_a_client_that_leaves_later_is_found(poller):
    outlet = Recorder()
    _, found = watched(poller, outlet)
    assert not found.wait(0.2)
    outlet.gone = True
    assert found.wait(5)


def test_among_300_streams_each_one_is_asked(poller):
    outlets = [Recorder() for _ in range(300)]
    found = [watched(poller, outlet)[1] for outlet in outlets]
    for outlet in outlets[::30]:
        outlet.gone = True
    assert all(event.wait(10) for event in found[::30])


def test_ended_streams_are_forgotten(poller):
    outlet = Recorder()
    stream, _ = watched(poller, outlet)
    stream.finish()
    assert outlet.events == [("close",)]
    _, found = watched(poller, left := Recorder())  # asked after the first one's turn
    left.gone = True
    assert found.wait(5)
    assert outlet.num_polls == 0


def test_a_question_that_fails_does_not_stop_the_poller(poller):
    broken = Recorder()
    broken.is_cancelled = lambda: 1 // 0  # type: ignore[method-assign]
    watched(poller, broken)
    gone = Recorder()
    gone.gone = True
    assert watched(poller, gone)[1].wait(5)


def test_stop_ends_an_idle_poller():
    poller = CancelPoller()
    poller.stop(5)
    assert not any(thread.name == "cancel-poller" and thread.is_alive() for thread in threading.enumerate())
