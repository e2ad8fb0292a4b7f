"""The pool behind BLS calls."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from bireme.triton import daemon_threads
from bireme.triton.daemon_threads import DaemonThreads


@pytest.fixture
def pool():
    pool = DaemonThreads(3, "test")
    yield pool
    pool.shutdown()


def test_results_and_errors_come_back(pool):
    assert pool.submit(int, "7").result(5) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "x").result(5)


def threads_of(pool):
    """Return how many threads work side by side."""
    seen = set()

    def work():
        seen.add(threading.get_ident())
        time.sleep(0.05)

    for future in [pool.submit(work) for _ in range(10)]:
        future.result(5)
    return len(seen)


def test_no_more_threads_work_than_asked_for(pool):
    assert threads_of(pool) == 3


def test_what_waits_is_cancelled_at_shutdown():
    pool, release, begun = DaemonThreads(1, "test"), threading.Event(), threading.Event()
    running = pool.submit(lambda: (begun.set(), release.wait(5)))
    assert begun.wait(5)
    waiting = pool.submit(int, "7")
    pool.shutdown()
    assert waiting.cancelled()
    release.set()
    assert running.result(5)
    with pytest.raises(RuntimeError):
        pool.submit(int, "7")


def test_a_call_that_never_returns_does_not_keep_the_process():
    code = (
        "import time; from bireme.triton.daemon_threads import DaemonThreads\n"
        "DaemonThreads(1, 'test').submit(time.sleep, 3600); print('end')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=True, capture_output=True).stdout == b"end\n"


@pytest.fixture
def lose(monkeypatch):
    """Have calls of a pool lost, until the event is set."""
    monkeypatch.setattr(daemon_threads, "LOST_S", 0.05)
    return_all = threading.Event()

    def lose(pool, count):
        begun = [threading.Event() for _ in range(count)]
        calls = [pool.submit(lambda one=one: (one.set(), return_all.wait(30))) for one in begun]
        for one, call in zip(begun, calls, strict=True):
            assert one.wait(5)
            pool.leave(call)
        return return_all

    yield lose
    return_all.set()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_spares_take_the_place_of_lost_threads_for_calls_that_wait_already(lose):
    pool = DaemonThreads(2, "test", num_spares=2)
    lose(pool, 2)
    waiting = pool.submit(int, "7")
    until(lambda: pool.count_lost() == 2)
    assert waiting.result(5) == 7


def test_no_more_threads_are_replaced_than_there_are_spares(lose):
    pool = DaemonThreads(2, "test", num_spares=1)
    lose(pool, 2)
    until(lambda: pool.count_lost() == 2)
    lose(pool, 1)
    until(lambda: pool.count_lost() == 3)
    waiting = pool.submit(int, "7")
    pool.refuse_waiting(ValueError("nobody is left"))
    with pytest.raises(ValueError, match="nobody is left"):
        waiting.result(5)


def test_a_call_that_somebody_waits_for_is_not_lost_however_long_it_takes(lose):
    pool, release = DaemonThreads(2, "test", num_spares=1), threading.Event()
    lose(pool, 1)
    waited_for = pool.submit(release.wait, 30)
    until(lambda: pool.count_lost() == 1)
    time.sleep(2 * daemon_threads.LOST_S)
    assert pool.count_lost() == 1
    release.set()
    assert waited_for.result(5)


def test_a_lost_call_that_returns_after_all_leaves_as_many_threads_as_before(lose):
    pool = DaemonThreads(2, "test", num_spares=2)
    return_all = lose(pool, 2)
    until(lambda: pool.count_lost() == 2)
    return_all.set()
    until(lambda: pool.count_lost() == 0)
    assert threads_of(pool) == 2
