"""A process does not outlive its parent, uses its buffers' memory again, and ends without a look at each object."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from bireme import own_process

_STUB = """
import time

import functools, os
from bireme.own_process import watch_parent

watch_parent(functools.partial(os._exit, 1))
print("on", flush=True)
time.sleep(60)
"""
_SERVER = f"""
import subprocess, sys, time
stub = subprocess.Popen([sys.executable, "-c", {_STUB!r}], stdout=subprocess.PIPE)
stub.stdout.readline()
print(stub.pid, flush=True)
time.sleep(60)
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_process_ends_soon_after_its_parent():
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE)
    stub = int(server.stdout.readline())
    assert is_running(stub)
    server.kill()
    server.wait()
    deadline = time.monotonic() + 10
    while is_running(stub) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(stub), os.kill(stub, 9)


_ENDING = """
import atexit
from bireme.own_process import end_process

class Visited:
    def __del__(self):
        print("visited")

kept = Visited()
atexit.register(print, "handler")
end_process(3)
"""


def test_the_end_calls_the_exit_handlers_and_visits_no_object():
    done = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "handler\n")


_BUFFERS = """
import resource
from bireme import own_process
{}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work(times):
    for _ in range(times):
        buffers = [b"x" * 250_000 for _ in range(16)]
        del buffers
work(3)
before = faults()
work(100)
print(faults() - before)
"""


def page_faults(line, **environment):
    """Return how many pages the kernel had to clear for 100 times 4 MB."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", _BUFFERS.format(line)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, env=given | environment, check=True).stdout)


def test_buffers_that_come_and_go_share_their_memory():
    reused = page_faults("own_process.reuse_memory()")
    assert reused * 10 < page_faults("")
    assert page_faults("", **own_process.reused_memory_environment()) * 10 < page_faults("")


def test_settings_of_the_environment_are_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    assert set(own_process.reused_memory_environment()) == {"MALLOC_TRIM_THRESHOLD_"}
    environment = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    assert page_faults("own_process.reuse_memory()", **environment) > 10_000


_GIVING = """
from pathlib import Path
from bireme import own_process

def anonymous_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) >> 10

own_process.reuse_memory()
buffers = [bytearray(1 << 20) for _ in range(200)]
del buffers[:-1]
before = anonymous_mib()
own_process.give_back_memory()
print(before - anonymous_mib())
"""


def test_pages_of_freed_buffers_before_one_that_is_held_are_given_back():
    done = subprocess.run([sys.executable, "-c", _GIVING], stdout=subprocess.PIPE, check=True)
    assert int(done.stdout) > 150
