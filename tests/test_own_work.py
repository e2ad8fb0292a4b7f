"""Whose own work an engine was in when it stood still."""

from __future__ import annotations

import threading
import time

import pytest

from bireme import own_work
from bireme.own_work import Culprit, OwnWork, Work, WorkFile, culprit_of

KEY, OTHER = (3 << 20, 1 << 40), (1, 2)


@pytest.fixture
def clock(monkeypatch):
    """Return a function that lets so many seconds pass."""
    now = [1000.0]
    monkeypatch.setattr(own_work.time, "monotonic", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


@pytest.fixture
def both(tmp_path):
    """Return the two sides of a life's file."""
    file = WorkFile(tmp_path / "e.w")
    yield file, OwnWork.open(str(tmp_path / "e.w"))
    file.close()


def test_who_holds_the_engine_up_is_read_from_outside(both, clock):
    file, work = both
    with work.mark(KEY, Work.PROCESSORS):
        clock(6)
        assert culprit_of(file.read(), 6.0) == Culprit(*KEY, Work.PROCESSORS)
    assert culprit_of(file.read(), 6.0) is None


def test_work_that_began_late_in_the_stall_is_not_its_cause(both, clock):
    file, work = both
    clock(4)
    with work.mark(KEY, Work.GUIDE):
        clock(2)
        assert culprit_of(file.read(), 6.0) is None
        assert culprit_of(file.read(), 0.0) == Culprit(*KEY, Work.GUIDE)  # of a crash it is


def test_memory_that_a_crash_has_written_over_names_nobody():
    assert culprit_of(b"\xa5" * own_work.NUM_BYTES, 0.0) is None


def test_each_thread_has_a_record_of_its_own(both, clock):
    file, work = both
    with work.mark(KEY, Work.PROCESSORS):
        clock(6)
        thread = threading.Thread(target=_mark_for_a_moment, args=(work,))
        thread.start()
        thread.join()
        assert culprit_of(file.read(), 6.0) == Culprit(*KEY, Work.PROCESSORS)


def _mark_for_a_moment(work):
    with work.mark(OTHER, Work.PICTURES):
        pass


def test_who_is_tried_alone_is_at_fault_if_the_stall_began_after_it_and_nobody_else_is(both, clock):
    file, work = both
    work.try_alone(OTHER)
    clock(5)
    assert culprit_of(file.read(), 6.0) is None
    clock(1)
    assert culprit_of(file.read(), 6.0) == Culprit(*OTHER, Work.ALONE)
    assert culprit_of(file.read(), 0.0) is None
    with work.mark(KEY, Work.PROCESSORS):
        clock(6)
        assert culprit_of(file.read(), 6.0) == Culprit(*KEY, Work.PROCESSORS)
    work.try_alone(None)
    assert culprit_of(file.read(), 6.0) is None


def test_without_a_file_nothing_is_known_and_nothing_fails(tmp_path):
    file, work = WorkFile(tmp_path / "missing" / "e.w"), OwnWork.open(str(tmp_path / "missing" / "e.w"))
    with work.mark(KEY, Work.PROCESSORS):
        assert culprit_of(file.read(), 0.0) is None


def test_a_mark_costs_a_few_microseconds(both):
    mark = both[1].mark(KEY, Work.GUIDE)
    began = time.thread_time()
    for _ in range(1000):
        with mark:
            pass
    assert time.thread_time() - began < 0.05  # 1 ms on an idle machine
