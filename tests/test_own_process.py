"""A process does not outlive its parent, and ends without a look at each object."""

from __future__ import annotations

import os
import subprocess
import sys
import time

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
