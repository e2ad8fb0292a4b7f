"""A stream's buffer, end and cancellation, with a recorder in Triton's place."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bireme.errors import RequestError
from bireme.triton.streams import Stream
from bireme.types import TensorResponse
from tests.triton.recording import Recorder, Words


def make_stream(outlet, *, is_decoupled=True, limit=1000):
    queue: list[Stream] = []
    return Stream(outlet, queue.append, is_decoupled=is_decoupled, max_buffer_bytes=limit), queue


@pytest.fixture
def outlet():
    return Recorder()


def test_what_piled_up_goes_out_as_one_response(outlet):
    stream, queue = make_stream(outlet)
    for word in "abc":
        stream.send(Words([word]))
    assert queue == [stream]  # enqueued once
    stream.flush()
    assert outlet.events == [("send", ["a", "b", "c"], False)]


def test_a_stream_that_waits_is_enqueued_again_when_it_becomes_urgent(outlet):
    stream, queue = make_stream(outlet)
    stream.send(Words(["first"]))
    assert stream.is_urgent and queue == [stream]
    stream.flush()
    stream.send(Words(["a"]))
    assert not stream.is_urgent and queue == [stream] * 2
    stream.finish()
    assert stream.is_urgent and queue == [stream] * 3
    for _ in range(2):
        stream.flush()
    assert outlet.events == [("send", ["first"], False), ("send", ["a"], True)]


def test_a_flush_with_nothing_new_sends_nothing(outlet):
    stream, _ = make_stream(outlet)
    stream.flush()
    assert outlet.events == [] and not stream.is_closed


def test_responses_that_do_not_merge_keep_their_order(outlet):
    stream, _ = make_stream(outlet)
    apart = TensorResponse({"words": np.array(["b"], object)})
    for response in (Words(["a"]), apart, Words(["c"]), Words(["d"])):
        stream.send(response)
    stream.flush()
    assert [event[1] for event in outlet.events] == [["a"], ["b"], ["c", "d"]]


def test_the_last_response_takes_the_final_flag_along(outlet):
    stream, _ = make_stream(outlet)
    stream.send(Words(["a"]))
    stream.send(Words(["b"], is_last=True))
    stream.flush()
    stream.finish()
    stream.flush()
    assert outlet.events == [("send", ["a", "b"], True)]


def test_an_end_that_comes_with_the_last_response_is_merged_too(outlet):
    stream, _ = make_stream(outlet)
    stream.send(Words(["a"]))
    stream.finish()
    stream.flush()
    assert outlet.events == [("send", ["a"], True)]


def test_an_end_of_its_own_is_the_bare_flag(outlet):
    stream, queue = make_stream(outlet)
    stream.finish()
    stream.flush()
    assert outlet.events == [("close",)]
    assert stream.is_closed


def test_an_error_follows_what_was_sent_before(outlet):
    stream, _ = make_stream(outlet)
    stream.send(Words(["a"]))
    stream.finish(RequestError("odd"))
    stream.flush()
    assert outlet.events == [("send", ["a"], False), ("fail", "odd")]


def test_nothing_is_taken_after_the_end(outlet):
    stream, queue = make_stream(outlet)
    stream.finish()
    stream.send(Words(["late"]))
    stream.finish(RequestError("later"))
    stream.flush()
    stream.flush()
    assert outlet.events == [("close",)]


def test_a_unary_answer_carries_the_flag_at_once(outlet):
    stream, _ = make_stream(outlet, is_decoupled=False)
    stream.send(Words(["a"]))
    stream.send(Words(["b"]))
    stream.flush()
    assert outlet.events == [("send", ["a"], True)]


def test_a_unary_request_without_an_answer_is_an_error(outlet):
    stream, _ = make_stream(outlet, is_decoupled=False)
    stream.finish()
    stream.flush()
    assert outlet.events == [("fail", "the model ended the request without an answer")]


def test_a_send_that_triton_refuses_becomes_the_error(outlet):
    stream, _ = make_stream(outlet)
    outlet.error = TypeError("no such tensor")
    stream.send(Words(["a"]))
    stream.flush()
    assert outlet.events == [("fail", "no such tensor")]
    assert stream.cancelled and stream.is_closed
    stream.finish()
    stream.flush()
    assert len(outlet.events) == 1


def test_a_slow_reader_is_ended_and_its_stage_told(outlet):
    stream, _ = make_stream(outlet, limit=25)
    for word in "abc":
        stream.send(Words([word]))
    assert stream.cancelled
    stream.flush()
    ((kind, text),) = outlet.events
    assert kind == "fail"
    assert text.startswith("slow reader: 30 bytes of responses wait to be sent; the limit is 25")


def test_one_response_above_the_limit_is_sent_when_nothing_waits(outlet):
    stream, _ = make_stream(outlet, limit=25)
    stream.send(Words(["big"], num_bytes=1000))
    stream.flush()
    assert outlet.events == [("send", ["big"], False)]


def test_a_cancelled_stream_drops_what_waits_and_still_ends(outlet):
    stream, _ = make_stream(outlet)
    stream.send(Words(["a"]))
    outlet.gone = True
    assert not stream.poll()
    assert stream.cancelled
    stream.send(Words(["b"]))
    stream.finish()
    stream.flush()
    assert outlet.events == [("close",)]


def test_a_closed_stream_is_not_asked_any_more(outlet):
    stream, _ = make_stream(outlet)
    stream.finish()
    stream.flush()
    assert not stream.poll()
    assert outlet.num_polls == 0


def test_polls_and_ends_race_without_asking_after_the_flag():
    for _ in range(300):
        outlet = Recorder()
        stream, _ = make_stream(outlet)
        polls = threading.Thread(target=lambda stream=stream: [stream.poll() for _ in range(20)])
        polls.start()
        stream.send(Words(["a"]))
        stream.finish()
        stream.flush()
        polls.join()
        assert outlet.events == [("send", ["a"], True)]


def test_sends_from_many_threads_all_go_out_once(outlet):
    stream, queue = make_stream(outlet, limit=1 << 20)

    def send(start):
        for at in range(start, start + 200):
            stream.send(Words([str(at)]))

    threads = [threading.Thread(target=send, args=(i * 200,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        stream.flush()
    stream.finish()
    stream.flush()
    words = [int(word) for event in outlet.events if event[0] == "send" for word in event[1]]  # and perhaps a close
    assert sorted(words) == list(range(800))
    assert [word for word in words if word < 200] == list(range(200))
