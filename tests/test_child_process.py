"""Child processes are ended whole; pauses between starts double."""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path

import pytest

from bireme import child_process
from bireme.child_process import Backoff, ChildProcess, describe_exit


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(child_process, "time", clock)
    return clock


def run(program, **options):
    return ChildProcess([sys.executable, "-c", program], **options)


def test_what_a_child_has_started_ends_with_it():
    child = run(
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1).pid, flush=True);"
        "sys.stdin = open('/dev/zero'); sys.stdin.buffer.read()",
        output=-1,
    )
    grandchild = int(child.lines.readline())
    assert not child.has_exited and is_alive(grandchild)
    assert child.reap() == -signal.SIGKILL
    while is_alive(grandchild):
        time.sleep(0.01)


def test_a_child_that_has_exited_keeps_its_own_exit_code():
    child = run("raise SystemExit(3)")
    assert child.wait(20)
    assert (child.reap(), child.exit_code, child.has_exited) == (3, 3, True)
    child.signal(signal.SIGTERM)
    child.kill()  # its pid may be another's by now: nobody gets this one


def test_a_child_ends_politely_when_asked():
    child = run("import time; print(flush=True); time.sleep(60)", output=-1)
    child.lines.readline()
    assert not child.wait(0)
    child.signal(signal.SIGTERM)
    assert child.wait(20)
    assert describe_exit(child.reap()) == "signal SIGTERM"


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(0.25, 10.0)
    assert [backoff.next_s() for _ in range(8)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert {backoff.next_s() for _ in range(2000)} == {10.0}
    backoff.reset()
    assert backoff.next_s() == 0.25


def test_one_start_more_than_the_limit_is_never():
    backoff = Backoff(0.1, 10.0, limit=9, window_s=300)
    assert [backoff.next_s() for _ in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.next_s() == math.inf
    assert Backoff(0.1, 10.0, limit=0).next_s() == math.inf


def test_starts_outside_the_window_are_forgotten(clock):
    backoff = Backoff(0.1, 10.0, limit=1, window_s=300)
    assert (backoff.next_s(), backoff.next_s()) == (0.1, math.inf)
    clock.now += 301
    assert backoff.next_s() == 0.1
