"""The publisher over real sockets, read by a reader that knows vLLM's format alone."""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from bireme.errors import ConfigError
from bireme.kv.publishing.held_blocks import HeldBlocks
from bireme.kv.publishing.zmq_plane import ZmqPlane
from bireme.kv.wire.curve import curve_keys, needs_curve
from bireme.kv.wire.event_wire import LOAD_TOPIC, WorkerLoad, WorkerPrices, decode_load
from tests.engines.engine_fixtures import wait_for
from tests.kv.publishing.event_readers import AllBlocksCleared, BlockRemoved, BlockStored, VllmSubscriber
from tests.kv.publishing.published import KEY, SIZE, Published

TOKENS = list(range(5, 37))
HASHES = [12561198586583604988, 17946932516392534513]  # of an independent publisher for these tokens


class Bench(Published):
    """A publisher, and a subscriber that knows vLLM's format alone."""

    def __init__(self, folder, topic="kv-events", **settings):
        super().__init__(folder, **settings)
        events = self.plane.load_endpoint if topic == "load" else self.plane.event_endpoint
        self.reader = VllmSubscriber(events, self.plane.replay_endpoint, topic)

    def sync(self):
        """Return once the subscription reaches the publisher and all so far has been read, and the next seq."""
        wait_for(lambda: self._arrives())
        last = self.store([secrets.randbelow(1 << 20) for _ in range(SIZE)])
        while True:
            _, seq, batch = self.reader.take()
            if any(_hashes(event) == last for event in batch.events):
                return seq + 1

    def _arrives(self):
        self.source.events.removed(1)
        self.store([secrets.randbelow(1 << 20) for _ in range(SIZE)])
        return self.reader.sub.poll(20)

    def close(self):
        super().close()
        self.reader.close()


@pytest.fixture
def bench(tmp_path):
    benches = []

    def make(**settings):
        benches.append(Bench(tmp_path, **settings))
        return benches[-1]

    yield make
    for one in benches:
        one.close()


@pytest.mark.parametrize("topic", ["kv-events", ""])
def test_a_reader_of_vllm_s_format_gets_the_stream_unchanged(bench, topic):
    one = bench(topic=topic)
    seq = one.sync()
    one.store(TOKENS)
    name, number, batch = one.reader.take()
    assert (name, number, batch.data_parallel_rank) == (b"kv-events", seq, 0)
    assert batch.events == [BlockStored(HASHES, None, TOKENS, SIZE, None, "GPU", None)]
    assert abs(batch.ts - time.time()) < 60


def test_what_happens_together_shares_a_batch(bench):
    one = bench()
    one.sync()
    with one.source.unread:
        one.source.store(TOKENS)
        one.source.events.removed(HASHES[1])
        one.source.events.removed(HASHES[0])
    one.publisher.wake()
    assert one.reader.take()[2].events[1:] == [BlockRemoved(HASHES[::-1], "GPU")]


def test_missed_batches_are_sent_again_from_the_one_that_is_asked_for(bench):
    one = bench()
    seq = one.sync()
    for _ in range(3):
        one.store([secrets.randbelow(1 << 20) for _ in range(SIZE)])
        one.reader.take()
    again = one.reader.replay(seq + 1)
    assert [number for number, _ in again] == [seq + 1, seq + 2]
    assert all(isinstance(batch.events[0], BlockStored) for _, batch in again)


def test_a_start_below_what_is_kept_is_answered_by_a_snapshot(bench):
    one = bench(replay_batches=1)
    seq = one.sync()
    one.store(TOKENS)
    one.reader.take()
    (number, batch), *rest = one.reader.replay(0)
    assert number == seq and isinstance(batch.events[0], AllBlocksCleared)
    told = [value for _, part in [(number, batch), *rest] for event in part.events[0:] for value in _hashes(event)]
    assert told[-2:] == HASHES


def _hashes(event):
    return getattr(event, "block_hashes", ())


def test_a_snapshot_can_be_asked_for(bench):
    one = bench()
    one.sync()
    one.store(TOKENS)
    seq = one.reader.take()[1]
    answers = one.reader.replay(-1)
    assert {number for number, _ in answers} == {seq}
    assert isinstance(answers[0][1].events[0], AllBlocksCleared)


def test_a_start_in_the_future_is_answered_by_a_snapshot_too(bench):
    """Its reader has seen another life at this address."""
    one = bench()
    one.sync()
    assert isinstance(one.reader.replay(1 << 40)[0][1].events[0], AllBlocksCleared)


def test_ranks_have_topics_and_sequences_of_their_own(bench):
    one = bench(num_ranks=2, topic="1/kv-events")
    rank_1 = one.reader.replay(0, b"1/kv-events")
    assert [(number, batch.data_parallel_rank) for number, batch in rank_1] == [(0, 1)]
    assert one.reader.replay(0)[0][1].data_parallel_rank == 0


@pytest.mark.parametrize(
    "frames", [[b""], [b"x", b"8" * 8], [b"", b"short"], [b"", b"\xff" * 8, b"load"], [b"", b"\x80" * 8]]
)
def test_a_request_that_makes_no_sense_gets_no_answer_and_breaks_nothing(bench, frames):
    one = bench()
    socket = one.reader._context.socket(zmq.DEALER)
    socket.connect(one.plane.replay_endpoint)
    socket.send_multipart(frames)
    socket.send_multipart([b"", b"\xff" * 8])
    assert socket.poll(10_000)
    assert isinstance(one.reader.replay(-1)[0][1].events[0], AllBlocksCleared)


def test_a_buffer_that_ran_over_is_told_as_a_loss_of_everything(bench):
    one = bench(max_size=2)
    one.sync()
    one.metrics.take_delta()
    with one.source.unread:
        for _ in range(4):
            one.source.store([secrets.randbelow(1 << 20) for _ in range(SIZE)])
        one.source.events.removed(1)
    one.publisher.wake()
    assert isinstance(one.reader.take()[2].events[-1], AllBlocksCleared)
    assert one.counter("bireme_kv_event_gaps_total") == 3


def test_an_error_is_counted_and_the_next_events_come(bench):
    one = bench()
    one.sync()
    one.source.error = RuntimeError("the engine is out of order")
    one.publisher.wake()
    wait_for(lambda: one.counter("bireme_kv_event_errors_total"))
    one.source.error = None
    one.source.store(TOKENS)
    assert one.reader.take()[2].events[0].block_hashes == HASHES


PRICES = WorkerPrices(5.4, (2.0, 2.5, 8.6, 48.0, 235.0), 2048, 1.2, 0.0004)


def test_load_is_told_when_it_changes_and_as_a_sign_of_life(bench):
    one = bench(topic="load", has_events=False)

    def report():
        assert one.reader.sub.poll(5000)
        topic, _, payload = one.reader.sub.recv_multipart()
        assert topic == LOAD_TOPIC
        return decode_load(payload)

    first = report()
    assert (first.worker, first.life, first.next_seqs, first.load.prices) == ("decode", 7, [], None)
    one.source.prices = lambda: PRICES
    one.source.state |= {"num_running": 3, "num_waiting_tokens": 50}
    one.publisher.wake()
    expected = WorkerLoad(3, 0, 50, 0, 8, 0, PRICES)
    wait_for(lambda: report().load == expected)
    assert report().load == expected  # a second later, unchanged


def test_a_late_subscriber_learns_from_the_load_where_the_sequence_stands(bench):
    one = bench(topic="load")
    assert one.reader.sub.poll(5000)
    report = decode_load(one.reader.sub.recv_multipart()[2])
    assert report.next_seqs == [1]  # the first batch says that nothing is held


def test_the_engine_never_waits_for_a_reader_that_reads_nothing(bench):
    one = bench()
    one.sync()
    silent = one.reader._context.socket(zmq.DEALER)
    silent.connect(one.plane.replay_endpoint)
    for _ in range(200):
        silent.send_multipart([b"", b"\xff" * 8])
    wait_for(lambda: one.counter("bireme_kv_event_replays_total"))
    one.store(TOKENS)
    assert one.reader.take()[2].events[0].block_hashes == HASHES


class SlowPlane(ZmqPlane):
    """Takes answers once it is told to."""

    is_stuck = True

    def answer(self, client, seq, payload):
        return not self.is_stuck and super().answer(client, seq, payload)


def test_readers_that_ask_meanwhile_share_a_snapshot_and_get_what_came_after_it(tmp_path, monkeypatch):
    made, snapshot = [], HeldBlocks.snapshot
    monkeypatch.setattr(HeldBlocks, "snapshot", lambda held: made.append(held) or snapshot(held))
    one = Published(tmp_path, plane=SlowPlane(f"ipc://{tmp_path}/decode-7", "", KEY))
    reader = VllmSubscriber(one.plane.event_endpoint, one.plane.replay_endpoint)
    with ThreadPoolExecutor(9) as pool:
        answers = []
        for number in range(1, 10):
            stored = one.store([number] * SIZE)
            wait_for(lambda number=number: one.publisher._ranks[0].next_seq > number)
            answers.append(pool.submit(reader.replay, -1))
            wait_for(lambda number=number: len(one.publisher._answers) == number)
        one.plane.is_stuck = False
        told = [
            {value for _, batch in answer.result() for event in batch.events for value in _hashes(event)}
            for answer in answers
        ]
    one.close()
    reader.close()
    assert (
        len(made) == 1
        and all(len(hashes) == number for number, hashes in enumerate(told, 1))
        and set(stored) <= told[-1]
    )


def test_deleted_socket_files_are_made_again(bench, tmp_path):
    one = bench()
    for path in tmp_path.glob("decode-7.*"):
        path.unlink()
    wait_for(lambda: len(list(tmp_path.glob("decode-7.*"))) == 3)
    reader = VllmSubscriber(one.plane.event_endpoint, one.plane.replay_endpoint)
    assert reader.replay(-1)
    reader.close()


def test_readers_miss_nothing_while_socket_files_are_made_again(bench, tmp_path):
    one = bench()
    first = one.sync()
    for path in tmp_path.glob("decode-7.*"):
        path.unlink()
    made_again = None
    while made_again is None or time.monotonic() < made_again + 0.5:  # a cut connection is there again by then
        if made_again is None and len(list(tmp_path.glob("decode-7.*"))) == 3:
            made_again = time.monotonic()
        one.store([secrets.randbelow(1 << 20) for _ in range(SIZE)])
        time.sleep(0.005)
    last, seqs, told = one.store(TOKENS), [], []
    while told != last:
        _, seq, batch = one.reader.take()
        seqs.append(seq)
        told = _hashes(batch.events[-1])
    assert seqs == list(range(first, first + len(seqs)))


def test_closing_leaves_no_socket_and_no_thread(bench, tmp_path):
    one = bench()
    one.close()
    assert list(tmp_path.glob("decode-7.*")) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-publisher"]


def test_addresses_of_other_hosts_need_curve():
    assert not needs_curve("ipc:///run/x") and not needs_curve("tcp://127.0.0.1:*") and not needs_curve("tcp://[::1]:5")
    assert needs_curve("tcp://10.0.0.1:*") and needs_curve("tcp://0.0.0.0:1") and needs_curve("tcp://host:1")


@pytest.fixture
def curve_bench(bench, monkeypatch):
    """CURVE without a second host: loopback is treated like any other address."""
    monkeypatch.setattr("bireme.kv.publishing.zmq_plane.needs_curve", lambda endpoint: endpoint.startswith("tcp://"))
    return bench(host="127.0.0.1")


def _answers_to(endpoint, key):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = curve_keys(key, "reader")
    socket.curve_serverkey = curve_keys(key, "engine")[0]
    socket.connect(endpoint)
    socket.send_multipart([b"", b"\xff" * 8])
    try:
        return bool(socket.poll(1000))
    finally:
        context.destroy(0)


def test_with_curve_the_deployment_s_key_opens_the_stream_and_nothing_else_does(curve_bench):
    endpoint = curve_bench.plane.replay_endpoint
    assert _answers_to(endpoint, KEY)
    assert not _answers_to(endpoint, b"another key")


def test_with_curve_a_client_with_keys_of_its_own_reads_nothing(curve_bench):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = curve_keys(KEY, "engine")[0]  # even if that became known
    socket.connect(curve_bench.plane.replay_endpoint)
    socket.send_multipart([b"", b"\xff" * 8])
    assert not socket.poll(1000)
    context.destroy(0)


def test_an_address_that_is_not_this_host_s_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="set kv_events.host to an address of this host"):
        ZmqPlane(f"ipc://{tmp_path}/x", "192.0.2.1", KEY)


def test_a_plane_that_was_gone_for_an_hour_is_used_again(bench):
    """Its pauses double with each failed turn: 2 to the power of 1024 is no float."""
    one = bench()
    for _ in range(5000):
        one.publisher._backoff.next_s()
    one.source.error = OSError("gone")
    one.publisher.wake()
    wait_for(lambda: one.publisher._had_failed)
    one.source.error = None
    one.sync()


def test_load_is_told_while_sockets_cannot_be_made_again(bench, monkeypatch):
    one = bench(topic="load")

    def tick():
        raise OSError("no such folder")

    monkeypatch.setattr(one.plane, "tick", tick)
    one.publisher._reported_at = 0.0
    one.source.state["num_running"] = 3
    one.publisher.wake()
    wait_for(lambda: one.reader.sub.poll(20) and decode_load(one.reader.sub.recv_multipart()[2]).load.num_running == 3)


def test_an_engine_whose_publisher_has_closed_wakes_nothing(tmp_path):
    one = Published(tmp_path)
    one.close()
    one.publisher.wake()
    one.plane.wake()  # by a thread that was told before
