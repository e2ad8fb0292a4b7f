"""The memory service and an engine's hold on weights, over the real socket."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from bireme.discovery import run_folder
from bireme.engines.memory.client import WeightsHold, connect, forget
from bireme.engines.memory.service import MemoryService
from bireme.engines.memory.wire import Challenge, Granted, Publish, new_socket, receive, send, socket_path
from bireme.errors import UnavailableError
from tests.engines.engine_fixtures import wait_for

KEY = b"k" * 32


@pytest.fixture
def launch(tmp_path):
    """Return a function that starts a service in the run folder, after ending the one before."""
    made = []

    def start(key=KEY):
        for service in made:
            service.stop()
        made[:] = [MemoryService(socket_path(tmp_path), key)]
        made[0].start()
        return made[0]

    start()
    yield start
    made[0].stop()


@pytest.fixture
def hold(launch, tmp_path):
    """Return a function that makes an engine's hold."""
    with contextlib.ExitStack() as held:

        def make(worker="decode", weights="w", key=KEY):
            made = WeightsHold(tmp_path, key, worker, weights)
            held.callback(made.close)
            return made

        yield make


def memory(text):
    descriptor = os.memfd_create("test")
    os.pwrite(descriptor, text, 0)
    return descriptor


def fill(hold, text=b"weights"):
    assert hold.attach(5)[0].role == "fill"
    hold.publish((memory(text), memory(b"table")), len(text), 1.5)
    return hold


def mapped(hold, wait_s=5):
    """Return what an engine maps: the bytes of memory and table."""
    granted, descriptors = hold.attach(wait_s)
    assert granted.role == "map"
    return tuple(os.pread(descriptor, 100, 0) for descriptor in descriptors)


def test_the_first_engine_fills_and_the_others_map_the_same_memory(hold):
    first = fill(hold())
    second = hold("prefill")
    assert mapped(second) == (b"weights", b"table")
    inodes = [os.fstat(one._descriptors[0]).st_ino for one in (first, second)]
    assert inodes[0] == inodes[1]


def test_weights_outlive_the_engine_that_read_them(hold):
    fill(hold()).close()
    assert mapped(hold()) == (b"weights", b"table")


def test_an_engine_that_comes_meanwhile_waits_until_the_first_has_filled(hold):
    first, second, found = hold(), hold("prefill"), []
    assert first.attach(5)[0].role == "fill"
    waiting = threading.Thread(target=lambda: found.append(mapped(second, 20)))
    waiting.start()
    first.publish((memory(b"late"), memory(b"table")), 4, 0.1)
    waiting.join()
    assert found == [(b"late", b"table")]


def test_when_the_one_that_fills_dies_the_next_one_fills(hold):
    first, second, found = hold(), hold("prefill"), []
    assert first.attach(5)[0].role == "fill"
    waiting = threading.Thread(target=lambda: found.append(second.attach(20)[0].role))
    waiting.start()
    first.close()
    waiting.join()
    assert found == ["fill"]


def test_an_engine_waits_no_longer_than_it_was_told(hold):
    assert hold().attach(5)[0].role == "fill"
    with pytest.raises(UnavailableError, match="timed out"):
        hold("prefill").attach(0.05)


def test_other_weights_are_filled_anew(hold):
    fill(hold())
    assert hold("prefill", "others").attach(5)[0].role == "fill"


def test_engines_are_told_how_many_they_are(hold):
    counts, later, first, second = [], [], fill(hold()), hold("prefill")
    first.keep(counts.append)
    mapped(second)
    second.keep(later.append)
    wait_for(lambda: counts[-1] == 2 and later[-1:] == [2], 10)
    second.close()
    wait_for(lambda: counts[-1] == 1, 10)
    assert (counts, later) == ([1, 1, 2, 1], [1, 2])  # each begins with itself


def test_engines_that_come_while_others_end_map_all_the_same(hold):
    fill(hold())

    def come_and_go(worker):
        for _ in range(50):
            engine = hold(worker)
            assert mapped(engine) == (b"weights", b"table")
            engine.close()

    with ThreadPoolExecutor(4) as engines:
        list(engines.map(come_and_go, ["one", "two", "three", "four"]))


def test_a_worker_that_comes_with_other_weights_frees_its_former_ones(hold):
    fill(hold()).close()
    fill(hold(weights="new"), b"new")
    assert hold("another").attach(5)[0].role == "fill"


def test_weights_that_another_worker_has_used_stay(hold):
    fill(hold()).close()
    mapped(hold("prefill"))
    fill(hold(weights="new"), b"new")
    assert mapped(hold("another")) == (b"weights", b"table")


def test_a_worker_can_have_its_weights_freed(hold, tmp_path, caplog):
    caplog.set_level(logging.INFO, "bireme.memory")
    fill(hold()).close()
    wait_for(lambda: "detached worker=decode" in caplog.text, 10)  # before, its end would free them, and not this
    assert forget(tmp_path, KEY, "decode") == 7
    assert hold().attach(5)[0].role == "fill"


def test_weights_of_a_worker_that_sleeps_already_are_freed_when_somebody_wants_that(hold, tmp_path, caplog):
    caplog.set_level(logging.INFO, "bireme.memory")
    fill(hold()).close()
    run_folder.ask_sleep(tmp_path, "decode")
    run_folder.ask_sleep(tmp_path, "decode", free_weights=True)
    wait_for(lambda: "weights_freed worker=decode bytes=7" in caplog.text, 10)
    assert hold().attach(5)[0].role == "fill"


@pytest.mark.parametrize("is_early", [False, True], ids=["it had them", "it was loading them"])
def test_a_worker_that_is_woken_before_its_engine_has_ended_keeps_its_weights(hold, tmp_path, is_early):
    first = hold()
    assert first.attach(5)[0].role == "fill"
    if not is_early:
        first.publish((memory(b"weights"), memory(b"table")), 7, 1.5)
        assert mapped(other := hold()) == (b"weights", b"table")  # the service has taken them
        other.close()
    run_folder.ask_sleep(tmp_path, "decode", free_weights=True)
    time.sleep(1.2)  # the service looks twice a second
    run_folder.wake(tmp_path, "decode")
    if is_early:
        first.publish((memory(b"weights"), memory(b"table")), 7, 1.5)
    first.close()
    assert mapped(hold()) == (b"weights", b"table")


def test_weights_that_another_worker_has_used_are_not_freed_for_one_that_sleeps(hold, tmp_path):
    fill(hold()).close()
    mapped(second := hold("prefill"))
    second.close()
    run_folder.ask_sleep(tmp_path, "decode", free_weights=True)
    time.sleep(1.2)
    assert mapped(hold("prefill")) == (b"weights", b"table")


def test_an_engine_with_another_key_gets_nothing(hold):
    fill(hold())
    with pytest.raises(UnavailableError, match="another deployment key"):
        hold("prefill", key=b"x" * 32).attach(5)


def test_an_engine_takes_nothing_from_a_service_that_does_not_know_the_key(hold, launch, tmp_path):
    launch().stop()
    with new_socket() as listener:
        listener.bind(str(socket_path(tmp_path)))
        listener.listen()
        threading.Thread(target=pretend, args=(listener,)).start()
        with pytest.raises(UnavailableError, match="another deployment key"):
            hold().attach(5)


def pretend(listener):
    """Grant somebody else's memory to whoever asks."""
    with listener.accept()[0] as link:
        send(link, Challenge(b"n" * 16))
        receive(link)
        send(link, Granted("map", b"p" * 32, 5), (memory(b"wrong"), memory(b"table")))


@pytest.mark.parametrize("packet", [b"\xc1", b"", b"\x90" * 70_000, b"\x81\xa4type\xa1z"])
def test_what_is_no_packet_ends_its_connection_alone(hold, tmp_path, packet):
    with connect(tmp_path) as link, contextlib.suppress(OSError):
        receive(link)
        link.send(packet)
    assert fill(hold())


def test_weights_without_descriptors_are_refused_and_the_next_engine_fills(hold):
    first = hold()
    assert first.attach(5)[0].role == "fill"
    send(first._link, Publish(7, 1.0))
    assert hold("prefill").attach(10)[0].role == "fill"


def test_without_a_service_the_reason_is_told(tmp_path):
    with pytest.raises(UnavailableError, match="no memory service"):
        WeightsHold(tmp_path, KEY, "decode", "w").attach(5)


def test_a_service_that_has_died_leaves_its_socket_and_the_reason_is_told(hold, launch, tmp_path):
    service = launch()
    service.stop()
    listener = service._bind()
    listener.close()
    with pytest.raises(UnavailableError, match="does not answer"):
        hold().attach(5)


def test_an_engine_hands_its_copy_to_the_next_service(hold, launch):
    first = fill(hold())
    first.keep(lambda count: None)
    launch()  # it knows nothing
    wait_for(lambda: asked(hold) == "map", 20)
    assert mapped(hold("prefill")) == (b"weights", b"table")


def asked(hold):
    """Return what a newcomer is told; one that is to fill leaves at once."""
    newcomer = hold("another")
    role = newcomer.attach(5)[0].role
    newcomer.close()
    return role


def test_a_socket_that_a_cleaner_removed_is_bound_again(hold, tmp_path):
    fill(hold())
    socket_path(tmp_path).unlink()
    wait_for(socket_path(tmp_path).exists, 10)
    assert mapped(hold("prefill")) == (b"weights", b"table")


def test_a_link_that_no_thread_is_left_for_is_refused_and_the_next_is_served(launch, hold, monkeypatch):
    start, refused = threading.Thread.start, []

    def refuse(thread):
        if thread.name == "memory-link" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises((UnavailableError, OSError)):
        hold().attach(5)
    assert refused
    fill(hold())
