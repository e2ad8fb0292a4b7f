"""A router's feed over real sockets: publishers that come, go, restart and lie; the index has the truth in the end."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from bireme.discovery.records import WorkerRecord
from bireme.kv.blocks.hashing import salt_key, salted_hash, sequence_hashes
from bireme.kv.following import feed
from bireme.kv.following.feed import KvFeed
from bireme.kv.following.index import KvIndex
from bireme.kv.wire.event_wire import LOAD_TOPIC, LoadReport, WorkerLoad, encode_payload
from bireme.metrics import Registry
from tests.engines.engine_fixtures import wait_for
from tests.kv.publishing.published import KEY, SIZE, Published, out_of_step

PROMPT = list(range(100, 100 + 8 * SIZE))
HASHES = sequence_hashes(PROMPT, SIZE)


class Router:
    """A feed with its index, and what it knows."""

    def __init__(self, key=KEY):
        self.metrics = Registry("generate")
        self.feed = KvFeed(KvIndex(), key, self.metrics)
        self.feed.start()

    def follow(self, *publishers):
        self.feed.follow({one.record.worker: one.record for one in publishers})

    def is_in_step(self, worker="decode"):
        wait_for(lambda: worker in self.feed.loads and not out_of_step(self.feed))

    def depth(self, worker, hashes=HASHES, tier=0):
        with self.feed.lock:
            slots = self.feed.slots.get(worker, ())
            return int(self.feed.index.match(hashes)[tier][slots[0]]) if slots else -1

    def finds(self, worker, depth, hashes=HASHES, tier=0):
        wait_for(lambda: self.depth(worker, hashes, tier) == depth)


@pytest.fixture
def publish(tmp_path):
    made = []

    def make(worker="decode", life=7, **settings):
        made.append(Published(tmp_path, worker, life, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def router():
    one = Router()
    yield one
    one.feed.close()


def test_what_workers_hold_and_how_busy_they_are_is_known(router, publish):
    first, second = publish("decode"), publish("decode_1")
    router.follow(first, second)
    first.store(PROMPT)
    second.store(PROMPT[: 3 * SIZE])
    router.finds("decode", 8)
    router.finds("decode_1", 3)
    second.source.state["num_running"] = 5
    second.publisher.wake()
    wait_for(lambda: "decode_1" in router.feed.loads and router.feed.loads["decode_1"].num_running == 5)


def test_a_router_that_starts_late_gets_what_was_stored_before(router, publish):
    one = publish(replay_batches=1)
    hashes = one.store(PROMPT)
    one.remove(hashes[7])
    router.follow(one)
    router.finds("decode", 7)


def test_removals_and_losses_are_taken(router, publish):
    one = publish(max_size=4)
    router.follow(one)
    hashes = one.store(PROMPT)
    router.finds("decode", 8)
    one.remove(hashes[2])
    router.finds("decode", 2)
    for value in range(6):  # the engine's buffer runs over
        one.source.events.removed(value)
    one.publisher.wake()
    router.finds("decode", 0)


def test_salted_blocks_are_found_by_who_has_the_key(router, publish):
    one = publish()
    router.follow(one)
    wire = [salted_hash(value, salt_key(KEY)) for value in one.store(PROMPT, "tenant")]
    router.finds("decode", 8, wire)
    assert router.depth("decode") == 0


def test_blocks_in_host_memory_count_in_their_tier(router, publish):
    one = publish()
    router.follow(one)
    hashes = one.store(PROMPT)
    router.finds("decode", 8)
    one.source.events._events.append(_moved(one, hashes[4]))
    one.publisher.wake()
    router.finds("decode", 4)
    assert router.depth("decode", tier=1) == 8


def _moved(one, block_hash):
    from bireme.kv.blocks.events import HOST, BlocksMoved

    one.source.events._next_id += 1
    return BlocksMoved(one.source.events._next_id - 1, (block_hash,), HOST)


def test_a_worker_that_leaves_gives_its_memory_back(router, publish):
    one = publish()
    router.follow(one)
    one.store(PROMPT)
    router.finds("decode", 8)
    router.follow()
    wait_for(lambda: router.feed.index.num_memberships == 0)
    assert router.feed.slots == {} and router.feed.loads == {}


def test_a_restarted_worker_holds_what_its_new_life_has_stored(router, publish):
    old = publish(life=7)
    router.follow(old)
    old.store(PROMPT)
    router.finds("decode", 8)
    old.close()
    new = publish(life=8)
    new.store(PROMPT[: 2 * SIZE])
    router.follow(new)
    router.finds("decode", 2)


def test_a_slot_that_the_index_s_owner_added_is_used_cleared_and_left_to_him(router, publish):
    one = publish()
    slot = router.feed.index.add_worker("decode")
    router.follow(one)
    one.store(PROMPT)
    router.finds("decode", 8)
    router.follow()
    wait_for(lambda: router.feed.index.num_memberships == 0)
    assert router.feed.index.slots == {"decode": slot}


def test_a_slot_that_went_to_another_worker_gets_none_of_the_first_one_s_blocks(router, publish):
    one = publish()
    router.feed.index.add_worker("decode")
    router.follow(one)
    router.is_in_step()
    with router.feed.lock:
        router.feed.index.remove_worker(router.feed.index.slots["decode"])
        router.feed.index.add_worker("decode_1")
    one.store(PROMPT)
    next_seq = one.publisher._ranks[0].next_seq
    wait_for(lambda: one.publisher._ranks[0].next_seq > next_seq or router.feed.loads)
    router.follow()
    wait_for(lambda: not router.feed.slots)
    assert router.feed.index.num_memberships == 0


def test_a_silent_worker_s_load_is_not_known(router, publish):
    one = publish()
    router.follow(one)
    wait_for(lambda: "decode" in router.feed.loads)
    router.is_in_step()
    one.close()
    wait_for(lambda: "decode" not in router.feed.loads)
    assert out_of_step(router.feed) == ["decode"]


def test_load_is_known_where_events_are_off(router, publish):
    one = publish(has_events=False)
    router.follow(one)
    wait_for(lambda: "decode" in router.feed.loads)
    assert router.feed.slots == {"decode": ()} and out_of_step(router.feed) == []


def test_ranks_of_a_worker_have_slots_of_their_own(router, publish):
    from bireme.kv.blocks.events import BlocksStored, StoredBlock

    one = publish(num_ranks=2)
    one.record = msgspec.structs.replace(one.record, capacity=_capacity(2))
    router.follow(one)
    router.is_in_step()
    block = StoredBlock(HASHES[0], tuple(PROMPT[:SIZE]))
    one.source.events._events.append(BlocksStored(0, None, (block,), dp_rank=1))
    one.publisher.wake()
    with_rank = lambda: router.feed.index.match(HASHES)[0][list(router.feed.slots["decode"])]  # noqa: E731
    wait_for(lambda: list(with_rank()) == [0, 1])


def _capacity(ranks):
    from bireme.messages import Capacity

    return Capacity(
        max_seq_len=1, max_batch_size=1, max_num_tokens=1, max_queue_size=1, tokens_per_block=SIZE,
        num_blocks=1, vocab_size=1, attention_dp_size=ranks,
    )  # fmt: skip


class Liar:
    """Sockets at which anything may be said."""

    def __init__(self, folder):
        self.context = zmq.Context()
        self.pub, self.replay = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.pub.bind(f"ipc://{folder}/liar.e")
        self.replay.bind(f"ipc://{folder}/liar.r")
        endpoints = [socket.last_endpoint.decode() for socket in (self.pub, self.replay)]
        self.record = WorkerRecord(
            worker="liar", life=1, load_endpoint=endpoints[0], event_endpoint=endpoints[0], replay_endpoint=endpoints[1]
        )


@pytest.fixture
def liar(tmp_path):
    one = Liar(tmp_path)
    yield one
    one.context.destroy(0)


@pytest.mark.parametrize(
    "frames, reason",
    [
        ([b"kv-events"], "malformed"),
        ([b"kv-events", b"short", b""], "malformed"),
        ([b"kv-events", b"\0" * 8, b"\xc1"], "malformed"),
        ([b"kv-events", b"\0" * 8, encode_payload([1.0, [["Unknown"]], 0])], "malformed"),
        ([b"kv-events", b"\0" * 8, encode_payload([1.0, [["BlockStored", [-1], None, [], 4]], 0])], "malformed"),
        ([b"kv-events", b"\0" * 8, encode_payload([1.0, [], 3])], "malformed"),
        ([b"kv-events/x", b"\0" * 8, encode_payload([1.0, [], 0])], "malformed"),
        ([b"kv-events", b"\0" * 8, encode_payload([1.0, [["BlockStored"]], 0]).replace(b"k", b"\xff")], "malformed"),
        ([b"load", b"\0" * 8, b"\xc1"], "malformed"),
        ([b"load", b"\0" * 8, encode_payload([1.0, [1] * 6, "decode", 7, []]).replace(b"d", b"\xff")], "malformed"),
        ([b"load"], "malformed"),
    ],
)
def test_what_can_not_be_read_is_counted_and_the_others_go_on(router, publish, liar, frames, reason):
    honest = publish()
    router.follow(honest, liar)

    def told():
        liar.pub.send_multipart(frames)
        return router.feed.counters[reason]

    wait_for(told)
    honest.store(PROMPT)
    router.finds("decode", 8)
    assert router.depth("liar") == 0


@pytest.mark.parametrize("worker, life, reason", [("somebody", 1, "unknown_worker"), ("liar", 0, "dead_life")])
def test_reports_of_others_at_a_worker_s_address_are_counted_and_not_believed(router, liar, worker, life, reason):
    router.follow(liar)
    report = LoadReport(1.0, WorkerLoad(9, 9, 9, 9, 9, 9), worker, life, [])

    def told():
        liar.pub.send_multipart([LOAD_TOPIC, b"\0" * 8, encode_payload(report)])
        return router.feed.counters[reason]

    wait_for(told)
    assert router.feed.loads == {}


def test_an_engine_with_another_key_is_not_heard(publish, monkeypatch):
    for module in ("publishing.zmq_plane", "following.zmq_link"):
        monkeypatch.setattr(f"bireme.kv.{module}.needs_curve", lambda endpoint: endpoint.startswith("tcp://"))
    one, stranger, friend = publish(host="127.0.0.1"), Router(b"another key"), Router()
    for router in (stranger, friend):
        router.follow(one)
    one.store(PROMPT)
    friend.finds("decode", 8)
    assert stranger.depth("decode") == 0 and not stranger.feed.loads
    for router in (stranger, friend):
        router.feed.close()


def test_an_address_that_makes_no_sense_leaves_the_others_followed(router, publish):
    one = publish()
    broken = WorkerRecord(worker="broken", life=1, load_endpoint="nonsense", event_endpoint="", replay_endpoint="")
    router.feed.follow({"broken": broken, "decode": one.record})
    one.store(PROMPT)
    router.finds("decode", 8)


def test_closing_ends_the_thread_and_frees_the_sockets(publish):
    router = Router()
    router.follow(publish())
    router.feed.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-feed"]


def test_metrics_tell_gaps_resyncs_and_what_was_left_out(router, publish, liar):
    router.follow(publish(), liar)
    wait_for(lambda: router.feed.counters["resyncs"])
    liar.pub.send_multipart([b"kv-events/x"])
    names = set()

    def seen():
        delta = router.metrics.take_delta()
        names.update(name for name, *_ in (*delta.counters, *delta.gauges))
        liar.pub.send_multipart([b"kv-events/x"])
        return {"bireme_kv_feed_resyncs_total", "bireme_kv_feed_discarded_total"} <= names

    wait_for(seen)


def test_a_worker_that_could_not_be_followed_is_tried_again(router, publish, monkeypatch, caplog):
    one, open_link, failures = publish(), router.feed.open_link, [0]

    def refuse_twice(record, num_ranks):
        if failures[0] < 2:
            failures[0] += 1
            raise zmq.ZMQError(errno.EMFILE)
        return open_link(record, num_ranks)

    monkeypatch.setattr(router.feed, "open_link", refuse_twice)
    monkeypatch.setattr(feed, "_RETRY_S", 0.05)
    router.follow(one)
    wait_for(lambda: failures[0])
    one.store(PROMPT)
    router.finds("decode", 8)
    router.is_in_step()
    assert [record.msg for record in caplog.records].count("kv_feed_not_followed worker=%s error=%s") == 1


def test_a_worker_that_cannot_be_followed_is_not_in_step(router, publish, monkeypatch):
    monkeypatch.setattr(router.feed, "open_link", Mock(side_effect=zmq.ZMQError(errno.EMFILE)))
    router.follow(publish())
    wait_for(lambda: out_of_step(router.feed) == ["decode"])
    router.follow()
    wait_for(lambda: out_of_step(router.feed) == [])


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_events_and_load_come_over_ipv6(router, publish):
    one = publish(host="::1")
    assert one.record.event_endpoint.startswith("tcp://[::1]:")
    one.store(PROMPT)
    router.follow(one)
    router.finds("decode", 8)
    router.is_in_step()
