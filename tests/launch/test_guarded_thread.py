"""Threads that must not end: an error is a turn's, and a thread that is gone is seen and started again."""

import errno
import io
import threading

import pytest

from bireme.launch.console import Console
from bireme.launch.guarded_thread import GuardedThreads

LIMIT_S = 20


def threads_and_log():
    log = io.StringIO()
    return GuardedThreads(Console(stream=log)), log


def test_a_turn_that_raises_ends_neither_the_thread_nor_the_next_turn():
    threads, log = threads_and_log()
    turns, done = iter([OSError(errno.EMFILE, "Too many open files"), None]), threading.Event()

    def turn():
        if (error := next(turns, None)) is not None:
            raise error
        done.set()

    thread = threads.start("poll", turn, interval_s=0.01)
    assert done.wait(LIMIT_S) and threads.problems() == {}
    thread.stop()
    assert "turn_failed thread=poll count=1" in log.getvalue() and "Too many open files" in log.getvalue()
    assert "turns_succeed_again thread=poll failed=1" in log.getvalue()


def test_the_same_failure_is_told_once_and_counted():
    threads, log = threads_and_log()
    thread = threads.start("poll", lambda: None)
    thread.stop()
    for _ in range(99):
        thread._note_failure(failure())
    assert log.getvalue().count("turn_failed") == 2  # the first and the tenth


def failure():
    try:
        raise ValueError("wrong")
    except ValueError as error:
        return error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_is_a_problem_until_it_is_started_again():
    threads, log = threads_and_log()
    ends, again = threading.Event(), threading.Event()

    def turn():
        if not ends.is_set():
            ends.set()
            raise SystemExit
        again.set()

    thread = threads.start("poll", turn, interval_s=0.01)
    thread._thread.join(LIMIT_S)
    assert threads.problems() == {"poll": "thread poll has ended"}
    threads.revive()
    assert again.wait(LIMIT_S) and threads.problems() == {} and "thread_revived" in log.getvalue()
    thread.stop()
    assert threads.problems() == {}


def test_a_turn_says_when_the_next_one_is_due():
    threads, _ = threads_and_log()
    count, done = iter(range(3)), threading.Event()

    def turn():
        if next(count, None) is None:
            done.set()
        return 0.0

    thread = threads.start("poll", turn, interval_s=3600)
    assert done.wait(LIMIT_S)
    thread.stop()
