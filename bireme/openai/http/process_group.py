"""Several processes for one frontend: starts them, restarts dead ones, and ends them together.

The parent serves nothing itself. SIGTERM and SIGINT reach every process, which then drains as if alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bireme.child_process import Backoff, ChildProcess
from bireme.discovery.pulse import own_pulse
from bireme.launch.process_watch import ProcessWatch
from bireme.openai.http.group_folder import DeadGroup, GroupFolder, dead_groups
from bireme.openai.http.members import Member
from bireme.stop_signals import on_stop_signal

_LOOK_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_GRACE_S = 3.0  # beyond the drain
_STALL_S = 60.0  # without a sign of life, even if it uses CPU
_STEADY_S = 60.0  # after so long a life the pause is short again
logger = logging.getLogger("bireme.openai")


def run_group(arguments: Sequence[str], count: int, launch: int, drain_timeout_s: float) -> int:
    """Run `count` processes with these arguments until a signal; return the exit code.

    `launch`: pid of the process that starts another group when this one dies; 0: none does.
    """
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    with on_stop_signal(signals.put), GroupFolder(launch) as folder:  # no signal from now on leaves the folder behind
        members = [Member(number, count, folder.path) for number in range(count)]
        given = [*arguments, "--launch", str(launch)]
        return _Group(given, members, dead_groups(launch), drain_timeout_s, signals).run()


class _Group:
    def __init__(
        self, arguments: Sequence[str], members: list[Member], before: list[DeadGroup], drain_timeout_s: float,
        signals: queue.SimpleQueue[int],
    ) -> None:  # fmt: skip
        """`before`: their members serve until ours do. `signals`: to pass on, in the order in which they came."""
        self._signals = signals
        self._arguments = arguments
        self._pulse = own_pulse()
        self._processes = [_MemberProcess(member) for member in members]
        self._before = before
        self._end_s = drain_timeout_s + _GRACE_S
        self._kill_at = 0.0  # the time limit of processes asked to end
        self._watch = _watch_of(members[0].folder, self._processes)

    def run(self) -> int:
        for process in self._processes:
            process.start(self._arguments)
        while not self._pass_on():
            with contextlib.suppress(OSError):  # /proc can't be read now
                self._succeed(all(process.has_served for process in self._processes))
                if self._watch is not None:
                    self._watch.turn()
            for process in self._processes:
                if (code := process.ended()) is None:
                    continue
                if not process.has_served:  # a wrong option or a missing file: the next one would fail as well
                    self._signals.put(signal.SIGTERM)
                    self._wait()
                    return abs(code) or 1
                process.restart(self._arguments)
        return self._wait()

    def _pass_on(self) -> bool:
        """Wait a moment for a signal. Return whether there was one; every process has it then."""
        if self._pulse is not None:
            self._pulse.beat()
        try:
            number = self._signals.get(timeout=_LOOK_S)
        except queue.Empty:
            return False
        for process in self._processes:
            process.signal(number)
        return True

    def _wait(self) -> int:
        """Pass further signals on until all have ended, or should have; return the worst exit code."""
        kill_at = time.monotonic() + self._end_s
        while any(process.ended() is None for process in self._processes) or self._before:
            self._pass_on()
            with contextlib.suppress(OSError):
                self._succeed(now=True)
            if time.monotonic() > kill_at:  # stopped, or hung
                for process in self._processes:
                    process.signal(signal.SIGKILL)
        return max(abs(process.ended() or 0) for process in self._processes)

    def _succeed(self, now: bool) -> None:
        """Have the members of dead groups end: once ours serve, or end themselves."""
        if not self._before or not now:
            return
        if not self._kill_at:
            self._kill_at = time.monotonic() + self._end_s
            for group in self._before:
                group.succeed()
        if time.monotonic() > self._kill_at:
            for group in self._before:
                group.kill()
        self._before = [group for group in self._before if not group.remove()]


class _MemberProcess:
    def __init__(self, member: Member) -> None:
        self._member = member
        self._process: ChildProcess | None = None
        self._began_at = self._start_at = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self.has_served = False

    def start(self, arguments: Sequence[str]) -> None:
        own = ("--member", str(self._member), "--parent", str(os.getpid()))
        self._process = ChildProcess([sys.executable, "-m", "bireme.openai", *arguments, *own])
        self._began_at = time.monotonic()

    @property
    def role(self) -> str:
        return f"member{self._member.number}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ended(self) -> int | None:
        assert self._process is not None
        self.has_served = self.has_served or self._member.has_served
        return self._process.exit_code

    def restart(self, arguments: Sequence[str]) -> None:
        """Start again, after a pause that doubles with each early death; to be called until it has happened."""
        now = time.monotonic()
        if not self._start_at:
            if now - self._began_at > _STEADY_S:
                self._backoff.reset()
            self._start_at = now + self._backoff.next_s()
            logger.error("member_died number=%d restart_in_s=%g", self._member.number, self._start_at - now)
        if now >= self._start_at:
            self._start_at = 0.0
            try:
                self.start(arguments)
            except OSError as error:  # no descriptor, process or memory left: after the next pause again
                logger.error("member_start_failed number=%d error=%s", self._member.number, error)

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.signal(number)


def _watch_of(folder: Path, processes: list[_MemberProcess]) -> ProcessWatch | None:
    """Return what kills hung members; None in a launch, which does that itself."""
    if os.environ.get("BIREME_SHM_PREFIX"):
        return None
    prefix = f"{folder.name}_"
    os.environ["BIREME_SHM_PREFIX"] = prefix  # for the members

    def kill(role: str, pid: int, cause: str) -> None:
        logger.error("member_killed role=%s pid=%d cause=%s", role, pid, cause)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    return ProcessWatch(lambda: {process.role: process.pid for process in processes}, kill, prefix, _STALL_S)
