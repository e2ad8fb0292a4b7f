"""The pool behind BLS calls."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

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


def test_no_more_threads_work_than_asked_for(pool):
    release, seen = threading.Event(), set()

    def work():
        seen.add(threading.get_ident())
        release.wait(5)

    futures = [pool.submit(work) for _ in range(10)]
    release.set()
    for future in futures:
        future.result(5)
    assert 1 <= len(seen) <= 3


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
