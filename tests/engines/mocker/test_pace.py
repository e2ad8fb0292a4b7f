"""The mocker's clock thread: which scheduler it asks the kernel for."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bireme.engines.mocker.pace import Pace

ORDINARY, REAL_TIME = os.SCHED_OTHER, os.SCHED_RR | os.SCHED_RESET_ON_FORK


def scheduler_after(step_ms):
    """Return the scheduler of a thread that has sharpened its pace, and of no other."""

    def sharpened():
        Pace(threading.Event()).sharpen(step_ms)
        return os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(sharpened).result()
    assert os.sched_getscheduler(0) == ORDINARY
    return found


@pytest.fixture
def cpus(monkeypatch):
    def set_count(count):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))

    set_count(2)
    return set_count


def may_be_real_time():
    """Return whether the kernel lets this process; root in a container may lack CAP_SYS_NICE."""

    def tried():
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            return False
        return True

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(tried).result()


def test_a_paced_thread_is_a_real_time_one(cpus):
    if not may_be_real_time():
        pytest.skip("needs CAP_SYS_NICE")
    assert scheduler_after(5.0) == REAL_TIME


def test_without_the_right_to_it_the_thread_stays_ordinary(cpus, monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert scheduler_after(5.0) == ORDINARY


@pytest.mark.parametrize(("step_ms", "count"), [(0.0, 2), (5.0, 1)])
def test_a_thread_that_never_sleeps_or_has_the_only_cpu_stays_ordinary(cpus, step_ms, count):
    cpus(count)
    assert scheduler_after(step_ms) == ORDINARY
