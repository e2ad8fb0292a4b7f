"""A log that nobody reads, and one that says the same thing thousands of times."""

import io
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections import deque

from bireme.launch.console import _MAX_ALIKE, Console, Repeats

TRITON = "E1122 21:40:55.{n:06d} 4711 http_server.cc:100] Accept failed: Too many open files ({n})"


def program(source):
    return [sys.executable, "-c", "from bireme.launch.console import Console\n" + textwrap.dedent(source)]


def test_a_reader_that_stands_still_holds_up_nobody():
    reads, writes = os.pipe()
    source = """
        console = Console()
        for number in range(10_000):
            console.event("said", number=number, text="x" * 1000)
        print("done", flush=True)
    """
    try:
        done = subprocess.run(program(source), stdout=subprocess.PIPE, stderr=writes, timeout=120, check=True)
    finally:
        os.close(reads)
        os.close(writes)
    assert done.stdout == b"done\n"


def test_what_was_dropped_is_counted_once_somebody_reads_again():
    source = """
        import sys
        console = Console()
        for number in range(10_000):
            console.event("said", number=number, text="x" * 1000)
        print("said", flush=True)
        sys.stdin.readline()
        console.flush(60)
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(program(source), stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "said\n"
        _, said = process.communicate("go on\n", timeout=120)
    dropped = sum(map(int, re.findall(r"\.\.\. (\d+) lines were dropped", said)))
    assert dropped > 0 and dropped + said.count("said number=") == 10_000


def test_lines_that_are_just_being_taken_are_waited_for(monkeypatch):
    console, written, at_the_end, is_taken = Console(), [], [], threading.Event()
    monkeypatch.setattr("bireme.launch.console._write_all", written.append)
    flushing = threading.Thread(target=lambda: (console.flush(60), at_the_end.extend(written)))

    class Queue(deque):
        def clear(self):
            super().clear()
            if not is_taken.is_set():
                flushing.start()
                flushing.join(0.3)  # it is given the time to end too early
                is_taken.set()

    console._queue = Queue()
    console.event("said")
    assert is_taken.wait(60)
    flushing.join()
    assert len(at_the_end) == 1


def test_all_that_was_said_is_written_by_the_end():
    done = subprocess.run(program("Console().event('ready', seconds=1.5)"), stderr=subprocess.PIPE, check=True)
    assert done.stderr.decode().endswith("serve  | ready seconds=1.50\n")


def test_a_line_that_comes_by_the_thousand_is_counted(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("bireme.launch.console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream=stream)
    for number in range(5000):
        console.triton_line(TRITON.format(n=number))
    assert stream.getvalue().count("Accept failed") == _MAX_ALIKE
    now[0] = 1.5
    console.triton_line("E1122 21:40:56.000000 4711 other.cc:1] something else")
    assert f"lines_alike not_shown={5000 - _MAX_ALIKE}" in stream.getvalue() and "something else" in stream.getvalue()


def test_a_flood_that_goes_on_is_one_line_a_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("bireme.launch.console.time.monotonic", lambda: now[0])
    repeats = Repeats()
    for second in range(3):
        now[0] = second * 1.0
        repeats.take()
        passed = [number for number in range(500) if not repeats.is_one_too_many(TRITON.format(n=number))]
    assert passed == [0]


def test_lines_that_differ_are_all_passed_on():
    stream = io.StringIO()
    console = Console(stream=stream)
    for number in range(1000):
        console.triton_line(f"model line {'x' * number}")
    assert len(stream.getvalue().splitlines()) == 1000
