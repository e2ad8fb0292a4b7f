"""Sender threads: order, merging under load, who goes first, orderly end."""

from __future__ import annotations

import time

import pytest

from bireme.coalescing import BUSY_TURN, LONGEST_PAUSE_S, SENDER_BURST_PAUSE_S
from bireme.triton import sender as sender_module
from bireme.triton.sender import pause_after
from bireme.triton.senders import Senders
from bireme.triton.streams import Stream
from tests.triton.recording import Recorder, Words


@pytest.fixture
def senders():
    senders = Senders(2)
    yield senders
    senders.stop(5)


def make_stream(senders, outlet):
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


def begin(senders, count):
    """Return streams whose first response is out: what they send next waits its turn."""
    outlets = [Recorder() for _ in range(count)]
    streams = [make_stream(senders, outlet) for outlet in outlets]
    for stream in streams:
        stream.send(Words(["0"]))
    for outlet in outlets:
        assert wait_for(lambda outlet=outlet: outlet.events)
    return streams, outlets


def hold(senders):
    """Have the only sender hang in a send until the recorder `is_open`."""
    outlet = Recorder()
    outlet.is_open.clear()
    make_stream(senders, outlet).send(Words(["held"]))
    assert outlet.is_sending.wait(5)
    return outlet


def wait_for(condition, limit_s=5.0):
    ends_at = time.monotonic() + limit_s
    while not condition() and time.monotonic() < ends_at:
        time.sleep(0.002)
    return bool(condition())


def record_order(outlets):
    """Return a list that names the recorders in the order of their next sends."""
    order: list[str] = []
    for name, outlet in outlets.items():
        outlet._note = lambda event, is_final, name=name: order.append(name)  # type: ignore[method-assign]
    return order


def test_first_and_last_responses_go_before_those_in_the_middle():
    senders = Senders(1)
    (middle, ending), (of_middle, of_ending) = begin(senders, 2)
    held, of_new = hold(senders), Recorder()
    order = record_order({"middle": of_middle, "ending": of_ending, "new": of_new})
    middle.send(Words(["a"]))
    ending.send(Words(["a"]))  # in the middle, until its end is known
    make_stream(senders, of_new).send(Words(["first"]))
    ending.send(Words(["b"], is_last=True))
    held.is_open.set()
    assert senders.stop(5)
    assert order == ["new", "ending", "middle"]


def test_a_response_that_is_urgent_by_itself_goes_first():
    senders = Senders(1)
    (plain, urgent), (of_plain, of_urgent) = begin(senders, 2)
    held = hold(senders)
    order = record_order({"plain": of_plain, "urgent": of_urgent})
    plain.send(Words(["a"]))
    urgent.send(Words(["a"], is_urgent=True))
    held.is_open.set()
    assert senders.stop(5)
    assert order == ["urgent", "plain"]


def test_one_that_is_always_urgent_does_not_starve_the_others():
    senders = Senders(1)
    (plain, flood), (of_plain, of_flood) = begin(senders, 2)
    held = hold(senders)
    sent = []

    def note(event, is_final):
        sent.append(event)
        if len(sent) < 50:
            flood.send(Words(["more"], is_urgent=True))

    of_flood._note = note  # type: ignore[method-assign]
    of_plain._note = lambda event, is_final: sent.append("plain")  # type: ignore[method-assign]
    plain.send(Words(["a"]))
    flood.send(Words(["a"], is_urgent=True))
    held.is_open.set()
    assert senders.stop(5)
    assert sent.index("plain") <= 2


def test_while_a_sender_rests_urgent_responses_go_out_and_others_are_merged(monkeypatch):
    monkeypatch.setattr(sender_module, "SENDER_BURST_PAUSE_S", 30.0)
    senders = Senders(1)
    (stream, other), (outlet, of_other) = begin(senders, 2)
    senders.burst(60)
    other.send(Words(["a"]))  # a turn, and the rest begins
    assert wait_for(lambda: len(of_other.events) == 2)
    for word in "abc":
        stream.send(Words([word]))
    assert make_and_send(senders).ended.wait(5)
    assert len(outlet.events) == 1
    assert senders.stop(5)  # ends the rest
    assert outlet.events[1:] == [("send", ["a", "b", "c"], False)]


def make_and_send(senders):
    outlet = Recorder()
    make_stream(senders, outlet).send(Words(["all"], is_last=True))
    return outlet


def test_after_a_long_turn_the_middle_waits_and_urgent_responses_do_not(monkeypatch):
    monkeypatch.setattr(sender_module, "PAUSE_PER_TURN", 1e6)
    monkeypatch.setattr(sender_module, "LONGEST_PAUSE_S", 30.0)
    senders = Senders(1)
    streams, outlets = begin(senders, BUSY_TURN)
    held = hold(senders)
    for stream in streams:
        stream.send(Words(["a"]))
    held.is_open.set()
    assert wait_for(lambda: all(len(outlet.events) == 2 for outlet in outlets))
    streams[0].send(Words(["b"]))
    assert make_and_send(senders).ended.wait(5)
    assert len(outlets[0].events) == 2
    assert senders.stop(5)
    assert outlets[0].events[2:] == [("send", ["b"], False)]


def test_a_sender_that_does_not_rest_sends_the_middle_at_once(senders, monkeypatch):
    monkeypatch.setattr(sender_module, "PAUSE_PER_TURN", 1e6)
    monkeypatch.setattr(sender_module, "LONGEST_PAUSE_S", 30.0)
    (stream,), (outlet,) = begin(senders, 1)
    for count, word in enumerate("abc", 2):
        stream.send(Words([word]))
        assert wait_for(lambda count=count: len(outlet.events) == count)


@pytest.mark.parametrize(
    ("count", "turn_s", "is_burst", "pause_s"),
    [
        (BUSY_TURN - 1, 0.01, False, 0.0),  # few streams
        (BUSY_TURN, 0.01, False, 0.01),  # as long as the turn was
        (BUSY_TURN, 9.0, False, LONGEST_PAUSE_S),
        (1, 0.001, True, SENDER_BURST_PAUSE_S),  # requests start
        (0, 9.0, True, 0.0),  # only urgent ones were sent
    ],
)
def test_how_long_a_sender_rests(count, turn_s, is_burst, pause_s):
    assert pause_after(count, turn_s, is_burst) == pause_s
