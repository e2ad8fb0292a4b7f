"""What becomes of a frontend's processes when one of them is killed, or stands still: the port stays open."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from bireme.launch import processes
from bireme.launch.ports import free_port
from tests.openai.frontend_process import LIMIT_S, wait_for

pytestmark = pytest.mark.flaky(reruns=1)

_LAUNCH = "import subprocess, sys; subprocess.Popen(sys.argv[1:] + ['--parent', str(__import__('os').getpid())]).wait()"


class Groups:
    """Starts groups of two processes on one port; their folders are in `folder`."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *options, launcher=False):
        """Return when both serve. `launcher`: the launch is a process of its own, and what is returned."""
        before = self.members()
        program = [sys.executable, "-m", "bireme.openai", "--recipe", "recipes/tiny-chat", "--grpc", "127.0.0.1:1"]
        command = [*program, "--port", str(self.port), "--processes", "2", "--drain-timeout", "1", *options]
        if launcher:
            command = [sys.executable, "-c", _LAUNCH, *command]
        process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(self.folder)}, start_new_session=True)
        self._started.append(process)
        wait_for(lambda: len(set(self.served()) - set(before)) == 2)
        return process

    def members(self):
        """Return the pids of all that live."""
        return [pid for pid in processes.all_pids() if self._is_member(processes.command_line(pid))]

    def served(self):
        """Return the pids of the members in folders whose members all take connections."""
        folders = [path for path in self.folder.glob("bireme-frontend-*") if len(list(path.glob("*.served"))) == 2]
        lines = {pid: " ".join(processes.command_line(pid)) for pid in self.members()}
        return [pid for pid, line in lines.items() if any(path.name in line for path in folders)]

    def _is_member(self, line):
        return "--member" in line and str(self.port) in line

    def answers(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/live", timeout=5) as reply:
            return reply.status == 200

    def close(self):
        for process in self._started:
            pids = [process.pid, *processes.descendants(process.pid)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def groups():
    with tempfile.TemporaryDirectory(prefix="groups-") as folder:  # short: sockets' paths end at 107 bytes
        found = Groups(Path(folder))
        yield found
        found.close()


def kill(process):
    process.kill()
    process.wait()


def test_members_of_a_killed_parent_serve_until_the_next_group_does(groups):
    first = groups.start("--parent", str(os.getpid()))
    members = groups.members()
    kill(first)
    second = groups.start("--parent", str(os.getpid()))
    wait_for(lambda: not set(members) & set(groups.members()))
    assert groups.answers() and len(groups.members()) == 2
    wait_for(lambda: len(list(groups.folder.iterdir())) == 1)
    second.terminate()
    assert second.wait(LIMIT_S) == 0 and not list(groups.folder.iterdir())


def test_members_of_a_killed_parent_go_on_answering(groups):
    first = groups.start("--parent", str(os.getpid()))
    members = groups.members()
    kill(first)
    wait_for(lambda: all(_parent_of(pid) != first.pid for pid in members))
    with pytest.raises(AssertionError):
        wait_for(lambda: set(groups.members()) != set(members) or not groups.answers(), 3)


def test_without_a_launch_that_would_start_the_next_group_members_end_with_their_parent(groups):
    kill(groups.start())
    wait_for(lambda: not groups.members())
    assert not list(groups.folder.iterdir())


def test_members_never_outlive_the_launch(groups):
    launch = groups.start(launcher=True)
    parent = processes.children(launch.pid)[0]
    os.kill(launch.pid, signal.SIGSTOP)  # it would see the group's end, and end
    os.kill(parent, signal.SIGKILL)
    wait_for(lambda: not processes.is_alive(parent))
    assert groups.answers() and len(groups.members()) == 2
    kill(launch)
    wait_for(lambda: not groups.members())
    assert not list(groups.folder.iterdir())


def test_what_killed_groups_left_is_removed(groups):
    first = groups.start("--parent", str(os.getpid()))
    kill(first)
    for pid in groups.members():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not groups.members())
    assert len(list(groups.folder.iterdir())) == 1
    groups.start()
    assert len(list(groups.folder.iterdir())) == 1


def test_a_member_that_stands_still_is_replaced(groups):
    groups.start()
    victim, other = groups.members()
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: not processes.is_alive(victim) and len(groups.members()) == 2)
    assert other in groups.members()


def test_a_member_that_is_stopped_does_not_outlive_its_group(groups):
    group = groups.start()
    os.kill(groups.members()[0], signal.SIGSTOP)
    group.terminate()
    assert group.wait(LIMIT_S) == signal.SIGKILL
    assert not groups.members()


def _parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
