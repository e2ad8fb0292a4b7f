"""Sender threads: order, merging under load, orderly end."""

from __future__ import annotations

import pytest
from recording import Recorder, Words

from bireme.triton.senders import Senders
from bireme.triton.streams import Stream


@pytest.fixture
def senders():
    senders = Senders(2)
    yield senders
    senders.stop(5)


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
