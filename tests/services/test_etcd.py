"""Discovery through a real etcd-server: leases, watches, outages."""

import threading
import time

import msgspec
import pytest

from benchmarks.chaos.etcd import EtcdServer
from bireme.discovery.etcd import EtcdStore
from bireme.discovery.follower import Follower
from bireme.discovery.registration import Registration
from bireme.discovery.store import NameTakenError, StoreError
from bireme.settings import DiscoveryConfig
from tests.discovery.conftest import KEY, by_id, record

LEASE_S = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def store(server, request):
    """Return a function that makes stores of this test alone; all are closed at its end."""
    made = []

    def make(*more, lease_s=LEASE_S, key=KEY):
        endpoints = (*more, server.endpoint)
        config = DiscoveryConfig(backend="etcd", endpoints=endpoints, prefix=request.node.name, lease_s=lease_s)
        made.append(EtcdStore(config, key))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def follow(store):
    """Return a function that starts to follow; what was told is in `.views`."""
    followers = []

    def start():
        views = []
        followers.append(Follower(store(), LEASE_S, views.append))
        followers[-1].views = views
        followers[-1].start()
        return followers[-1]

    yield start
    for one in followers:
        one.stop()


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def test_a_change_is_seen_without_polling(store, follow):
    writer, follower = store(), follow()
    until(lambda: not follower.problem)
    writer.hold(record())
    until(lambda: follower.records == by_id(record()))
    writer.hold(record(state="draining"))
    until(lambda: follower.records["decode@b:8001"].is_draining)
    writer.withdraw()
    until(lambda: not follower.records)


def test_a_watch_waits_as_long_as_nothing_changes(store):
    one, other = store(), store()
    for _ in range(2):
        one.read()
        began = time.monotonic()
        one.wait(0.5)
        assert time.monotonic() - began >= 0.5
    one.read()
    other.hold(record("decode"))
    one.wait(60.0)
    assert by_id(record("decode")).keys() == one.read().keys()


def test_a_store_that_is_closed_waits_no_longer(store):
    one = store()
    one.read()
    waiting = threading.Thread(target=one.wait, args=(60.0,))
    waiting.start()
    one.close()
    waiting.join(30)
    assert not waiting.is_alive()
    one.wait(60.0)


def test_a_worker_that_is_not_renewed_is_gone(store, follow):
    follower = follow()
    store().hold(record())
    until(lambda: follower.records)
    until(lambda: not follower.records)


def test_a_renewed_lease_lasts(store):
    registration = Registration(store(), LEASE_S)
    registration.set(record())
    reader = store()
    until(reader.read)
    deadline = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < deadline:
        assert reader.read() == by_id(record())
        time.sleep(0.1)
    registration.stop()
    assert reader.read() == {}


def test_a_value_that_is_no_record_is_left_out_by_name_and_told_once(store, caplog):
    writer, reader = store(), store()
    writer.hold(record())
    with writer._errors() as client:
        client.put(writer._prefix + "noise", b'{"worker":"de\xffcode"}')
    for _ in range(3):
        assert reader.read() == by_id(record())
    assert caplog.text.count(f"record_unreadable key={writer._prefix}noise") == 1


def test_a_value_without_proof_is_left_out_with_its_reason_and_takes_no_id(store, caplog):
    forger, reader = store(key=b"z" * 32), store()
    forger.hold(record())
    for _ in range(3):
        assert reader.read() == {}
    assert "signed with another deployment key" in reader.refused["decode@b:8001"][1]
    assert caplog.text.count("record_refused key=") == 1
    writer = store()
    writer.hold(record(launch="mine"))
    assert reader.read() == by_id(record(launch="mine")) and not reader.refused


def test_an_id_is_one_living_launch_s(store):
    store(lease_s=60).hold(record(launch="first"))
    with pytest.raises(NameTakenError, match="registered by another launch already"):
        store().hold(record(launch="second"))
    store().hold(record(launch="first", life=2))
    assert store().read()["decode@b:8001"].life == 2


def test_an_engine_whose_id_another_launch_has_says_so_and_registers_once_it_is_free(store):
    first, second = (Registration(store(), LEASE_S) for _ in range(2))
    first.set(record(launch="first"))
    until(store().read)
    second.set(record(launch="second"))
    until(lambda: "decode@b:8001 is registered by another launch already (first" in second.problem)
    first.stop()
    until(lambda: not second.problem)
    assert store().read()["decode@b:8001"].launch == "second"
    second.stop()


def test_another_prefix_is_another_deployment(store, server):
    store().hold(record())
    other = EtcdStore(DiscoveryConfig(backend="etcd", endpoints=(server.endpoint,), prefix="other"), KEY)
    assert other.read() == {}
    other.close()


def test_a_dead_endpoint_is_passed_by(store):
    writer = store("http://127.0.0.1:1")
    with pytest.raises(StoreError, match=r"etcd at http://127\.0\.0\.1:1"):
        writer.hold(record())
    writer.hold(record())
    assert store().read() == by_id(record())


def test_a_value_that_is_no_record_harms_no_other(store, server, request):
    from etcd3gw.client import Etcd3Client

    store().hold(record())
    host, port = server.endpoint.removeprefix("http://").split(":")
    Etcd3Client(host, int(port)).put(f"{request.node.name}/workers/noise", b"\xff{")
    assert store().read() == by_id(record())


def test_what_is_withdrawn_after_an_outage_is_gone_at_once(store, server):
    writer = store(lease_s=60)
    writer.hold(record())
    server.kill()
    with pytest.raises(StoreError):
        writer.hold(record(life=2))
    server.start()
    writer.withdraw()
    assert store().read() == {}


def test_while_etcd_is_gone_the_last_view_stands_and_then_goes_on(store, follow, server):
    registration, follower = Registration(store(), LEASE_S), follow()
    registration.set(record())
    until(lambda: follower.records)
    server.kill()
    until(lambda: follower.problem and registration.problem)
    time.sleep(2 * LEASE_S)
    assert follower.records == by_id(record())
    server.start()
    until(lambda: not follower.problem and not registration.problem)
    registration.set(msgspec.structs.replace(record(), state="draining"))
    until(lambda: follower.records["decode@b:8001"].is_draining)
    assert all(view for view in follower.views)
    registration.stop()
