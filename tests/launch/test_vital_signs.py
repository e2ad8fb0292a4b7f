"""Hung or only slow? Asked of real processes; the time is the test's own."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from bireme.child_process import has_waiting_thread
from bireme.config import SupervisorConfig
from bireme.launch import processes
from bireme.launch.process_watch import ProcessWatch
from bireme.launch.vital_signs import SILENT_S, VitalSigns

STALL_S = 60.0


class Time:
    """A clock that stands until it is told otherwise."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def run():
    """Return a function: Python code -> the process that runs it, which ends with the test."""
    started = []

    def start(code):
        started.append(subprocess.Popen([sys.executable, "-c", f"{code}"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def watch(process, seconds, signs=None):
    """Look once a second; return what was seen last. `signs`: default one that never moves."""
    signs = signs or itertools.repeat(7)
    clock = Time()
    vital = VitalSigns(process.pid, STALL_S, clock)
    for _ in range(seconds + 1):
        vital.look(next(signs))
        clock.now += 1.0
    return vital


def until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def asleep(run):
    process = run("import time; time.sleep(600)")
    until(lambda: processes.state(process.pid) == "S" and processes.command_line(process.pid)[1:2] == ["-c"])
    until(lambda: not has_waiting_thread(process.pid))
    return process


def test_a_process_that_says_and_does_nothing_is_hung(run):
    vital = watch(asleep(run), 6)
    assert "no work either" in vital.hung and "no sign of life" in vital.problem


def test_a_process_whose_count_moves_is_well(run):
    vital = watch(asleep(run), 30, itertools.count())
    assert vital.hung == "" and vital.problem == ""


def test_a_process_that_shows_no_signs_is_not_judged_by_them(run):
    assert watch(asleep(run), 100, itertools.repeat(None)).hung == ""


def test_a_silent_process_that_works_is_only_slow(run):
    process = run("while True: pass")
    until(lambda: processes.state(process.pid) == "R")
    vital = watch(process, 20)
    assert vital.hung == "" and "no sign of life" in vital.problem


def test_a_silent_process_that_works_is_hung_at_the_stall_limit(run):
    assert watch(run("while True: pass"), 60).hung == "no sign of life for 60 s"


def test_a_stopped_process_is_told_at_once_and_hung_soon(run):
    process = asleep(run)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: processes.state(process.pid) == "T")
    vital = watch(process, 0, itertools.repeat(None))
    assert vital.problem == f"process {process.pid} is stopped" and vital.hung == ""
    assert watch(process, 6, itertools.repeat(None)).hung.startswith("stopped")


def test_time_in_which_nobody_looked_counts_for_nothing(run):
    clock = Time()
    vital = VitalSigns(asleep(run).pid, STALL_S, clock)
    for now in (0.0, 1000.0, 1001.0):  # the machine slept
        clock.now = now
        vital.look(7)
    assert vital.hung == "" and vital.problem == ""


def test_an_ended_process_is_a_problem_until_its_successor_is_found(run):
    first, second = asleep(run), asleep(run)
    pids = {"one": first.pid}
    watcher = ProcessWatch(lambda: pids, lambda *_: None, "bireme_none_", STALL_S)
    watcher.turn()
    assert watcher.problems() == {}
    first.kill()
    first.wait()
    assert watcher.problems() == {"one": f"process {first.pid} has ended"}
    pids["one"] = second.pid
    watcher.turn()
    assert watcher.problems() == {}


def test_an_engine_may_be_as_silent_as_any_other_process_before_it_is_killed():
    assert SupervisorConfig().ping_timeout_s == SILENT_S
