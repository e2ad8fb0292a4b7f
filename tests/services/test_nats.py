"""KV events and load over a real nats-server, with and without JetStream: lies, outages and late readers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess

import msgspec
import pytest

from bireme.config import KvEventsConfig, RouterConfig
from bireme.kv.blocks.hashing import sequence_hashes
from bireme.kv.following.feed import KvFeed
from bireme.kv.following.index import KvIndex
from bireme.kv.publishing.nats_plane import NatsPlane
from bireme.kv.routing.router import WorkerRouter
from bireme.kv.wire.nats_connection import ENDPOINT, MAC_HEADER, SEQ_HEADER
from bireme.kv.wire.step_records import StepRing
from bireme.launch.ports import free_port
from bireme.metrics import Registry
from tests.engines.engine_fixtures import wait_for
from tests.kv.publishing.published import KEY, SIZE, Published, out_of_step
from tests.kv.publishing.test_step_stream import step as make_step

PROMPT = list(range(100, 100 + 8 * SIZE))
HASHES = sequence_hashes(PROMPT, SIZE)


class NatsServer:
    """A nats-server on a port of its own, which can be killed and started again with what it has stored."""

    def __init__(self, folder):
        program = shutil.which("nats-server")
        assert program, "nats-server is missing; run tools/services.sh"
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._kept = folder / "jetstream"
        self._command = [program, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self._kept)]
        self._log = (folder / "nats.log").open("ab")
        self.start()

    def start(self):
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def forget(self):
        """Lose what it has kept."""
        shutil.rmtree(self._kept)

    def close(self):
        self.kill()
        self._log.close()


@pytest.fixture
def server(tmp_path):
    one = NatsServer(tmp_path)
    yield one
    one.close()


@pytest.fixture(params=["nats", "jetstream"])
def config(server, request):
    return KvEventsConfig(plane=request.param, nats_url=server.url)


@pytest.fixture
def publish(tmp_path):
    """Return a maker of engines that publish over NATS."""
    made = []

    def make(config, worker="decode", life=7, **settings):
        plane = NatsPlane(config, worker, life, KEY, has_steps="ring" in settings)
        made.append(Published(tmp_path, worker, life, plane=plane, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def follow():
    """Return a maker of feeds that follow publishers."""
    feeds = []

    def make(config, *publishers, key=KEY):
        feed = KvFeed(KvIndex(), key, Registry("generate"), config=config)
        feeds.append(feed)
        feed.start()
        feed.follow({one.record.worker: one.record for one in publishers})
        return feed

    yield make
    for feed in feeds:
        feed.close()


def depth(feed, worker="decode"):
    with feed.lock:
        slots = feed.slots.get(worker, ())
        return int(feed.index.match(HASHES)[0][slots[0]]) if slots else -1


def is_sent(one):
    return one.plane._connection.problem == ""


def test_events_and_load_get_to_the_index(config, publish, follow):
    one, other = publish(config), publish(config, "decode_1")
    feed = follow(config, one, other)
    wait_for(lambda: feed.loads and out_of_step(feed) == [])
    hashes = one.store(PROMPT)
    other.store(PROMPT[: 2 * SIZE])
    wait_for(lambda: (depth(feed), depth(feed, "decode_1")) == (8, 2))
    one.remove(hashes[5])
    wait_for(lambda: depth(feed) == 5)
    one.source.state["num_running"] = 3
    one.publisher.wake()
    wait_for(lambda: feed.loads["decode"].num_running == 3)
    assert feed.problem == ""


def test_a_late_reader_gets_what_was_stored_before(config, publish, follow):
    one = publish(config)
    wait_for(lambda: is_sent(one))
    hashes = one.store(PROMPT)
    one.remove(hashes[6])
    feed = follow(config, one)
    wait_for(lambda: depth(feed) == 6)


def test_with_jetstream_a_late_reader_asks_the_stream_and_not_the_engine(server, publish, follow):
    config = KvEventsConfig(plane="jetstream", nats_url=server.url)
    one = publish(config)
    wait_for(lambda: one.plane._has_stream and is_sent(one))
    one.store(PROMPT)

    def is_told_by_the_stream():  # one that takes a second to answer is not waited for
        asked, late = one.counter("bireme_kv_event_replays_total"), follow(config, one)
        wait_for(lambda: depth(late) == 8)
        return one.counter("bireme_kv_event_replays_total") == asked

    wait_for(is_told_by_the_stream)


def test_with_jetstream_a_server_that_has_lost_its_stream_is_sent_on_and_gets_it_again(server, publish, follow):
    config = KvEventsConfig(plane="jetstream", nats_url=server.url)
    one = publish(config)
    feed = follow(config, one)
    wait_for(lambda: one.plane._has_stream and feed.loads and out_of_step(feed) == [])
    server.kill()
    server.forget()
    server.start()
    wait_for(lambda: one.plane.problem == "" and feed.problem == "", 30)
    for at in range(4):
        one.store(list(range(at, at + SIZE)))
    one.store(PROMPT)
    wait_for(lambda: depth(feed) == 8)
    wait_for(lambda: not one.plane._has_stream)
    wait_for(lambda: one.plane._has_stream and not one.plane._queue)
    late = follow(config, one)
    one.remove(HASHES[5])
    wait_for(lambda: depth(late) == 5, 30)


def test_while_the_server_is_gone_the_last_view_stands_and_says_so(config, server, publish, follow):
    one = publish(config)
    feed = follow(config, one)
    wait_for(lambda: feed.loads and out_of_step(feed) == [])
    one.store(PROMPT)
    wait_for(lambda: depth(feed) == 8)
    server.kill()
    wait_for(lambda: feed.problem.startswith("NATS:"))
    removed = HASHES[3]
    one.remove(removed)  # nobody hears it, and nobody waits
    wait_for(lambda: one.counter("bireme_kv_event_errors_total"))
    assert depth(feed) == 8
    server.start()
    wait_for(lambda: feed.problem == "", 30)
    wait_for(lambda: depth(feed) == 3, 30)


def test_a_router_says_that_its_view_is_old(config, server, publish, follow):
    one = publish(config)
    feed = follow(config, one)
    router = WorkerRouter(RouterConfig(), "round_robin", followers=[feed])
    wait_for(lambda: feed.loads and router.problem == "")
    server.kill()
    wait_for(lambda: router.problem.startswith("NATS: "))


def test_a_server_that_stands_still_is_told_as_soon_as_it_misses_three_pings(config, server, publish, follow):
    feed = follow(config, publish(config))
    wait_for(lambda: feed.loads and feed.problem == "")
    server.process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: feed.problem.startswith("NATS: "), 12)  # it took 14 s with a ping in 5
    finally:
        server.process.send_signal(signal.SIGCONT)
    wait_for(lambda: feed.problem == "", 30)


def test_an_engine_that_starts_before_the_server_is_heard_when_it_is_there(config, server, publish, follow):
    server.kill()
    one = publish(config)
    one.store(PROMPT)
    feed = follow(config, one)
    wait_for(lambda: "NATS:" in feed.problem)
    server.start()
    wait_for(lambda: depth(feed) == 8, 30)


def test_messages_without_the_deployment_s_signature_are_counted_and_not_believed(config, server, publish, follow):
    one = publish(config)
    feed = follow(config, one)
    wait_for(lambda: feed.loads and out_of_step(feed) == [])
    subject = one.record.event_endpoint.removeprefix(ENDPOINT) + ".events.0"
    forged = {SEQ_HEADER: "1", MAC_HEADER: "0" * 32}

    def told():
        asyncio.run(_send(server.url, subject, forged))
        return feed.counters["malformed"]

    wait_for(told)
    one.store(PROMPT)
    wait_for(lambda: depth(feed) == 8)


async def _send(url, subject, headers):
    import nats

    client = await nats.connect(url)
    await client.publish(subject, b"\x93\x01\x90\x00", headers=headers)
    await client.drain()


def test_a_reader_with_another_key_hears_nothing(config, publish, follow):
    one = publish(config)
    stranger, friend = follow(config, one, key=b"another key"), follow(config, one)
    wait_for(lambda: friend.loads and out_of_step(friend) == [])
    one.store(PROMPT)
    wait_for(lambda: depth(friend) == 8)
    assert depth(stranger) == 0 and stranger.loads == {}


def test_step_records_have_a_signed_subject_of_their_own(config, server, publish):
    one = publish(config, ring=StepRing())
    subject = one.record.step_endpoint.removeprefix(ENDPOINT) + ".steps"

    def step():
        one.ring.add(make_step())
        one.publisher.wake()

    number, record = asyncio.run(_heard(server.url, subject, step))
    assert (number, record["worker_id"], record["life"]) == (record["counter_id"], "decode@here:1", 7)


async def _heard(url, subject, act):
    """Act until a step's record is heard; return its seq and itself."""
    import nats

    client = await nats.connect(url)
    reader = await client.subscribe(subject)
    for _ in range(200):
        act()
        with contextlib.suppress(TimeoutError):
            message = await reader.next_msg(0.1)
            record = msgspec.msgpack.decode(message.data)
            if record["wall_time"]:
                assert len(message.headers[MAC_HEADER]) == 32
                await client.close()
                return int(message.headers[SEQ_HEADER]), record
    raise AssertionError("no record was heard")


def test_closing_ends_the_threads(config, publish, follow):
    import threading

    one = publish(config)
    feed = follow(config, one)
    wait_for(lambda: feed.loads and out_of_step(feed) == [])
    one.close()
    feed.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
