"""Workers of pods that find each other by EndpointSlices: each launch tells its own, and asks the others."""

import contextlib
import http.client
import threading
import time

import msgspec
import pytest

from bireme.discovery import pods
from bireme.discovery.follower import Follower
from bireme.discovery.kubernetes import KubernetesStore, open_store
from bireme.discovery.record_page import ALL_PATH, OWN_PATH, PageClient
from bireme.discovery.registration import Registration
from bireme.discovery.store import StoreError
from bireme.discovery.view import create_store
from bireme.errors import ConfigError
from bireme.launch.console import Console
from bireme.launch.guarded_thread import GuardedThreads
from bireme.launch.health_server import HealthServer
from bireme.launch.told_records import ToldRecords
from bireme.settings import DiscoveryConfig
from tests.discovery.cluster_api import SERVICE, cluster_api, endpoint, endpoint_slice
from tests.discovery.conftest import KEY, by_id, record

LEASE_S = 2.0


@pytest.fixture
def api(tmp_path, monkeypatch):
    with cluster_api(tmp_path) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        running.put(endpoint_slice("pair-none", 8003))  # a Service without pods has an empty slice
        yield running


class Launch:
    """What a launch has for it: engines' folder, health port, its own view."""

    def __init__(self, api, folder, key=KEY):
        config = settings(api)
        folder.mkdir(mode=0o700)
        self.folder, self.key, self.config = folder, key, config
        self.threads, self.ending = GuardedThreads(Console("error")), contextlib.ExitStack()
        self.told = ToldRecords(config, key, folder)
        self.health = HealthServer("127.0.0.1", 0, good, good, records=self.told.routes)
        self.ending.callback(self.health.stop)
        self.health.start()
        self.told.start(f"127.0.0.1:{self.health.port}", self.threads)
        self.ending.callback(self.told.stop)

    def stop(self):
        self.ending.close()

    def store(self):
        """Return that of a process of this launch."""
        return self.opened(BIREME_RUN_DIR=str(self.folder), BIREME_RECORDS=self.told.at)

    def opened(self, **environment):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return open_store(self.config, self.key)

    def follow(self):
        follower = Follower(self.store(), LEASE_S)
        follower.start()
        self.ending.callback(follower.stop)
        return follower

    def engine(self, *records):
        registration = Registration(self.store(), LEASE_S)
        self.ending.callback(registration.stop)
        for one in records:
            registration.set(one)
        return registration


def good():
    return True, {}


def settings(api):
    return DiscoveryConfig(backend="kubernetes", service=SERVICE, service_account=str(api.account), lease_s=LEASE_S)


@pytest.fixture
def launch(api, tmp_path):
    """Return a function that begins launches, as pods of the Service."""
    made = []

    def begin(name, key=KEY):
        made.append(one := Launch(api, tmp_path / name, key))
        api.put(endpoint_slice(f"pair-{name}", one.health.port, endpoint("127.0.0.1", name)))
        return one

    yield begin
    for one in made:
        one.stop()


def test_two_launches_find_each_other_s_workers_and_follow_their_states(launch, until):
    a, b = launch("a"), launch("b")
    of_a, of_b = a.follow(), b.follow()
    here, there = record("decode", "a:8001"), record("decode", "b:8001")
    a.engine(here)
    engine = b.engine(there)
    until(lambda: of_a.records == of_b.records == by_id(here, there))
    draining = record("decode", "b:8001", state="draining")
    engine.set(draining)
    until(lambda: of_a.records == by_id(here, draining))
    engine.stop()
    until(lambda: of_a.records == by_id(here))
    assert not of_a.problem


def test_a_change_is_told_at_once_and_an_unchanged_page_is_not_sent_again(launch, until):
    a = launch("a")
    engine = a.engine(record("decode", "a:8001"))
    client = PageClient("127.0.0.1", a.health.port, OWN_PATH)
    until(lambda: client.look(0.0) and client.page().workers)
    assert not client.look(1.0)
    engine.set(record("decode", "a:8001", life=2))
    assert client.look(30.0)
    assert msgspec.json.decode(client.page().workers[0])["life"] == 2


def test_a_pod_that_is_killed_is_gone_when_its_lease_ends(launch, until):
    a, b = launch("a"), launch("b")
    follower = a.follow()
    b.engine(record("decode", "b:8001"))
    until(lambda: follower.records)
    b.stop()
    until(lambda: not follower.records)
    assert not follower.problem  # the API server is well


class StandingClock:
    """Goes on when it is told to."""

    def __init__(self):
        self.now_s = time.monotonic()

    def monotonic(self):
        return self.now_s


def test_a_pod_that_left_the_service_is_asked_for_one_more_lease(api, launch, monkeypatch, until):
    clock = StandingClock()
    monkeypatch.setattr(pods, "time", clock)
    a, b = launch("a"), launch("b")
    follower, engine = a.follow(), b.engine(record("decode", "b:8001"))
    until(lambda: follower.records)
    api.delete("pair-b")
    launch("c").engine(record("decode", "c:8001"))
    until(lambda: "decode@c:8001" in follower.records)  # so that b has left, too, is known by now
    engine.set(record("decode", "b:8001", life=2))
    until(lambda: follower.records["decode@b:8001"].life == 2)
    clock.now_s += 0.9 * LEASE_S
    engine.set(record("decode", "b:8001", life=3))
    until(lambda: follower.records["decode@b:8001"].life == 3)
    clock.now_s += 0.2 * LEASE_S
    until(lambda: follower.records == by_id(record("decode", "c:8001")))


def test_while_the_api_server_is_gone_the_pods_that_are_known_are_asked_on(api, launch, until):
    a, b = launch("a"), launch("b")
    follower = a.follow()
    engine = b.engine(record("decode", "b:8001"))
    until(lambda: follower.records)
    api.stop()
    until(lambda: "API server at 127.0.0.1" in follower.problem)
    engine.set(record("decode", "b:8001", life=2))
    until(lambda: follower.records["decode@b:8001"].life == 2)
    api.start_again()
    until(lambda: not follower.problem)


def test_a_frontend_without_a_server_asks_for_itself(api, launch, monkeypatch, until):
    b = launch("b")
    b.engine(record("decode", "b:8001"))
    monkeypatch.setenv("BIREME_KEY", KEY.hex())
    follower = Follower(create_store(settings(api)), LEASE_S)
    follower.start()
    until(lambda: follower.records == by_id(record("decode", "b:8001")))
    follower.stop()


def test_nothing_is_known_before_each_pod_was_asked(api, launch, until):
    launch("b")
    store = open_store(settings(api), KEY)
    until(lambda: can_read(store))
    store.close()
    api.rotate("unknown", is_mounted=False)
    store = open_store(settings(api), KEY)
    until(lambda: "401" in problem_of(store))
    store.close()


def can_read(store):
    try:
        return store.read() == {}
    except StoreError:
        return False


def problem_of(store):
    with pytest.raises(StoreError) as raised:
        store.read()
    return str(raised.value)


def test_a_record_of_another_key_is_refused_by_name_and_told_once(launch, until, caplog):
    a, b = launch("a"), launch("b", key=b"z" * 32)
    b.engine(record("decode", "b:8001"))
    store = KubernetesStore(a.config, KEY, a.told)
    until(lambda: can_read(store) and store.refused)
    assert "another deployment key" in store.refused["decode@b:8001"][1]
    store.read()
    assert caplog.text.count("record_refused worker=decode@b:8001") == 1


def test_a_pod_that_tells_no_records_is_named_once_and_the_others_serve(api, launch, until, caplog):
    a, b = launch("a"), launch("b")
    old = HealthServer("127.0.0.1", 0, good, good)
    old.start()
    api.put(endpoint_slice("pair-old", old.port, endpoint("127.0.0.1", "old")))
    follower = a.follow()
    b.engine(record("decode", "b:8001"))
    until(lambda: follower.records and "pod_silent pod=uid-old" in caplog.text)
    assert "status 404" in caplog.text
    old.stop()


def test_a_second_address_of_a_pod_is_asked_where_the_first_does_not_answer(api, launch, until):
    a, b = launch("a"), launch("b")
    b.engine(record("decode", "b:8001"))
    api.delete("pair-b")
    api.put(endpoint_slice("pair-4", b.health.port, endpoint("127.0.0.9", "b2")))  # nobody listens there
    api.put(endpoint_slice("pair-6", b.health.port, endpoint("127.0.0.1", "b2"), family="IPv6"))
    follower = a.follow()
    until(lambda: follower.records)


def test_a_worker_that_no_launch_tells_of_is_not_registered(api):
    store = open_store(settings(api), KEY)
    with pytest.raises(StoreError, match="serve with tools/serve.py"):
        store.hold(record())
    store.close()


def test_who_waits_for_records_is_bounded(launch, monkeypatch, until):
    monkeypatch.setattr("bireme.launch.told_records._MAX_WAITING", 1)
    a = launch("a")
    until(lambda: a.told.page().workers is not None)
    first = PageClient("127.0.0.1", a.health.port, ALL_PATH)
    first.page()
    waiting = threading.Thread(target=look_quietly, args=(first,))
    waiting.start()
    until(lambda: a.told._num_waiting == 1)
    second = PageClient("127.0.0.1", a.health.port, ALL_PATH)
    second.page()
    with pytest.raises(StoreError, match="status 503"):
        second.look(30.0)
    first.close()
    waiting.join(30)
    assert not waiting.is_alive()


def look_quietly(client):
    with contextlib.suppress(StoreError):
        client.look(30.0)


def test_reading_asks_for_no_key_and_health_says_which_paths_there_are(launch):
    a = launch("a")
    connection = http.client.HTTPConnection("127.0.0.1", a.health.port)
    connection.request("GET", "/nowhere")
    assert b"/workers, /workers/all" in connection.getresponse().read()
    connection.close()


def test_the_key_is_asked_for_by_name(api, monkeypatch):
    monkeypatch.delenv("BIREME_KEY", raising=False)
    with pytest.raises(ConfigError, match="share discovery through kubernetes must have one key"):
        create_store(settings(api))
