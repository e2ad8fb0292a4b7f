"""Sender threads: order, merging under load, orderly end."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from recording import Recorder, Words

from bireme.triton import senders as senders_module
from bireme.triton.senders import BURST_REST_S, BUSY_TURN, LONGEST_REST_S, Senders
from bireme.triton.streams import Stream


@pytest.fixture
def senders():
    senders = Senders(2)
    yield senders
    senders.stop(5)


class Rests:
    """A sender's rests: each lasts until `is_over`."""

    def __init__(self) -> None:
        self.lengths_s: list[float] = []
        self.has_begun, self.is_over = threading.Event(), threading.Event()

    def sleep(self, seconds: float) -> None:
        self.lengths_s.append(seconds)
        self.has_begun.set()
        self.is_over.wait(10)


@pytest.fixture
def rests(monkeypatch):
    rests = Rests()
    monkeypatch.setattr(senders_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=rests.sleep))
    yield rests
    rests.is_over.set()


def flush_at_once(senders: Senders, count: int) -> tuple[list[Stream], list[Recorder]]:
    """Have the only sender find `count` streams when it comes back from a send; returns these."""
    first, *outlets = [Recorder() for _ in range(count + 1)]
    first.is_open.clear()
    make_stream(senders, first).send(Words(["a"]))
    assert first.is_sending.wait(5)
    streams = [make_stream(senders, outlet) for outlet in outlets]
    for stream in streams:
        stream.send(Words(["a"]))
    first.is_open.set()
    return streams, outlets


def make_stream(senders: Senders, outlet: Recorder) -> Stream:
    return Stream(outlet, senders.assign(), is_decoupled=True, max_buffer_bytes=1 << 20)


def test_an_idle_sender_sends_at_once(senders):
    outlet = Recorder()
    make_stream(senders, outlet).send(Words(["a"]))
    assert outlet.is_sending.wait(5)


def test_what_comes_during_a_send_is_merged_into_the_next(senders):
    outlet = Recorder()
    outlet.is_open.clear()
    stream = make_stream(senders, outlet)
    stream.send(Words(["a"]))
    assert outlet.is_sending.wait(5)
    for word in "bcd":
        stream.send(Words([word]))
    stream.finish()
    outlet.is_open.set()
    assert outlet.ended.wait(5)
    assert outlet.events == [("send", ["a"], False), ("send", ["b", "c", "d"], True)]


def test_many_streams_each_keep_their_order(senders):
    outlets = [Recorder() for _ in range(20)]
    streams = [make_stream(senders, outlet) for outlet in outlets]
    for at in range(200):
        for stream in streams:
            stream.send(Words([str(at)]))
    for stream in streams:
        stream.finish()
    for outlet in outlets:
        assert outlet.ended.wait(10)
        words = [word for event in outlet.events if event[0] == "send" for word in event[1]]
        assert words == [str(at) for at in range(200)]


def test_stop_sends_what_is_queued_first():
    senders, outlet = Senders(1), Recorder()
    stream = make_stream(senders, outlet)
    stream.send(Words(["a"]))
    stream.finish()
    assert senders.stop(5)
    assert outlet.ended.is_set()


def test_stop_gives_up_on_a_send_that_hangs():
    senders, outlet = Senders(1), Recorder()
    outlet.is_open.clear()
    make_stream(senders, outlet).send(Words(["a"]))
    assert outlet.is_sending.wait(5)
    assert not senders.stop(0.1)
    outlet.is_open.set()


def test_after_a_long_turn_a_sender_rests_and_what_comes_meanwhile_is_merged(rests):
    senders = Senders(1)
    (stream, *_), (outlet, *_) = flush_at_once(senders, BUSY_TURN)
    assert rests.has_begun.wait(5)
    for word in "bcd":
        stream.send(Words([word]))
    stream.finish()
    assert outlet.events == [("send", ["a"], False)]
    rests.is_over.set()
    assert senders.stop(5)
    assert outlet.events[1:] == [("send", ["b", "c", "d"], True)]


def test_a_rest_is_no_longer_than_the_turn_and_its_limit(rests):
    senders = Senders(1)
    began_at = time.monotonic()
    flush_at_once(senders, BUSY_TURN)
    assert rests.has_begun.wait(5)
    assert 0 < rests.lengths_s[0] <= min(LONGEST_REST_S, time.monotonic() - began_at)
    rests.is_over.set()
    assert senders.stop(5)


def test_while_requests_start_a_sender_rests_after_any_turn(rests):
    senders = Senders(1)
    senders.burst(60)
    (stream,), (outlet,) = flush_at_once(senders, 1)
    assert rests.has_begun.wait(5)
    stream.send(Words(["b"]))
    assert not outlet.events
    rests.is_over.set()
    assert senders.stop(5)
    assert rests.lengths_s and set(rests.lengths_s) == {BURST_REST_S}
    assert outlet.events == [("send", ["a", "b"], False)]


def test_a_sender_of_few_streams_does_not_rest(rests):
    senders = Senders(1)
    _, outlets = flush_at_once(senders, BUSY_TURN - 1)
    assert senders.stop(5)
    assert not rests.lengths_s
    assert all(outlet.events for outlet in outlets)
