"""Launches that a planner starts and ends beside one that serves: processes, which the next planner finds again."""

import contextlib
import io
import json
import os
import signal
import sys
import time

import pytest

from bireme.errors import BiremeError, ConfigError
from bireme.launch.admin_client import DoorClient
from bireme.launch.admin_door import AdminDoor, AdminSettings
from bireme.launch.console import Console
from bireme.launch.operations import Operations
from bireme.scaling.extra_launches import ExtraLaunches
from tests.launch.fake_launch import FakeLaunch

KEY = "0123456789abcdef0123"
# A launch's outside: its door answers after a moment, and at SIGTERM it ends once nothing holds it.
PROGRAM = """
import io, os, signal, sys, threading, time
from pathlib import Path
from bireme.launch.admin_door import AdminDoor, AdminSettings
from bireme.launch.console import Console
from bireme.launch.operations import Operations
from tests.launch.fake_launch import READY, FakeLaunch
words = dict(word.lstrip("-").split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
folder = Path(sys.argv[1])
(folder / f"argv-{os.getpid()}").write_text("\\n".join(sys.argv))
launch = FakeLaunch(folder)
launch.pages = ['bireme_engine_up{worker="decode"} 1']
console = Console("info", stream=io.StringIO())
door = AdminDoor(AdminSettings(port=int(words["admin-port"]), key_file=words["admin-key-file"]),
                 Operations(launch, console), console)
door.start()
stopping = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())
while not stopping.wait(0.02): pass
while (folder / "busy").exists(): time.sleep(0.02)
"""


@pytest.fixture
def base(tmp_path):
    (tmp_path / "key").write_text(KEY)
    launch, console = FakeLaunch(tmp_path), Console("info", stream=io.StringIO())
    launch.pages = ['bireme_engine_up{worker="decode"} 1']
    door = AdminDoor(AdminSettings(port=0, key_file=str(tmp_path / "key")), Operations(launch, console), console)
    door.start()
    yield DoorClient(f"http://127.0.0.1:{door.port}", KEY)
    door.stop()


@pytest.fixture
def make(base, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = f"env SLOT={{slot}} PYTHONPATH={os.getcwd()} {sys.executable} {program} {tmp_path} --discovery=/shared"
    yield lambda: ExtraLaunches(base, command, tmp_path / "launches", str(tmp_path / "key"))
    (tmp_path / "busy").unlink(missing_ok=True)
    path = tmp_path / "launches" / "launches.json"
    for one in json.loads(path.read_text()) if path.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(one["pid"], signal.SIGKILL)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sizes(launches, stage="decode"):
    one = launches.sizes()[stage]
    return one.num_ready, one.num_starting, one.num_ending


def test_launches_start_get_ready_drain_and_end(make, tmp_path):
    launches = make()
    assert sizes(launches) == (2, 0, 0)
    (done,) = launches.scale({"prefill": 1, "decode": 3})
    assert "a launch with a decode worker starts" in done and sum(sizes(launches)) == 3
    until(lambda: sizes(launches) == (3, 0, 0))
    assert sizes(launches, "prefill") == (1, 0, 0) and len(launches.pages()) == 2
    (words,) = [path.read_text().splitlines() for path in tmp_path.glob("argv-*")]
    assert "workers.decode.replicas=1" in words and "workers.prefill.replicas=0" in words
    (tmp_path / "busy").touch()
    assert "drains and ends" in launches.scale({"prefill": 1, "decode": 2})[0]
    assert sizes(launches) == (2, 0, 1)  # it has requests, and holds its GPU
    (tmp_path / "busy").unlink()
    until(lambda: sizes(launches) == (2, 0, 0))
    assert len(launches.pages()) == 1


def test_the_next_planner_goes_on_with_what_the_last_one_started(make):
    first = make()
    first.scale({"prefill": 1, "decode": 3})
    until(lambda: sizes(first) == (3, 0, 0))
    second = make()
    assert sizes(second) == (3, 0, 0)
    assert len(second.scale({"prefill": 1, "decode": 2})) == 1
    until(lambda: sum(sizes(first)) == 2 and sum(sizes(second)) == 2)


def test_one_that_dies_is_no_worker_any_more(make, tmp_path):
    launches = make()
    launches.scale({"prefill": 1, "decode": 3})
    until(lambda: sizes(launches) == (3, 0, 0))
    (one,) = json.loads((tmp_path / "launches" / "launches.json").read_text())
    os.kill(one["pid"], signal.SIGKILL)
    until(lambda: sizes(launches) == (2, 0, 0))


def test_fewer_than_the_launch_itself_has_are_refused_by_name(make):
    with pytest.raises(BiremeError, match=r"decode: 1 are wanted and the launch itself has 2; set decode.minimum"):
        make().scale({"prefill": 1, "decode": 1})


def test_a_command_that_can_t_be_run_is_told(base, tmp_path):
    launches = ExtraLaunches(base, "/nowhere --discovery=/shared", tmp_path / "launches", str(tmp_path / "key"))
    with pytest.raises(BiremeError, match="--start: /nowhere: it can't be run"):
        launches.scale({"prefill": 2, "decode": 2})
    with pytest.raises(ConfigError, match="name --discovery"):
        ExtraLaunches(base, "serve.py recipes/tiny", tmp_path / "launches", "")
