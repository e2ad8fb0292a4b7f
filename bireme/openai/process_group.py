"""Several processes for one frontend: starts them, starts again what dies, and ends them together.

One rule: it serves nothing itself. SIGTERM and SIGINT reach every process, which then drains as if alone.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bireme.discovery.pulse import own_pulse
from bireme.openai.members import Member
from bireme.stop_signals import on_stop_signal

_LOOK_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_STEADY_S = 60.0  # after so long a life the pause is short again
logger = logging.getLogger("bireme.openai")


def run_group(arguments: Sequence[str], count: int) -> int:
    """Run `count` processes with these arguments until a signal; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="bireme-frontend-") as folder:
        group = _Group(arguments, [Member(number, count, Path(folder)) for number in range(count)])
        with on_stop_signal(group.signals.put):
            return group.run()


class _Group:
    def __init__(self, arguments: Sequence[str], members: list[Member]) -> None:
        self.signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # to pass on, in the order in which they came
        self._arguments = arguments
        self._pulse = own_pulse()
        self._lives = [_Life(member) for member in members]

    def run(self) -> int:
        for life in self._lives:
            life.start(self._arguments)
        while not self._pass_on():
            for life in self._lives:
                if (code := life.ended()) is None:
                    continue
                if not life.has_served:  # a wrong option or a missing file: the next one would fail as well
                    self.signals.put(signal.SIGTERM)
                    self._wait()
                    return abs(code) or 1
                life.revive(self._arguments)
        return self._wait()

    def _pass_on(self) -> bool:
        """Wait a moment for a signal. Return whether there was one; every process has it then."""
        if self._pulse is not None:
            self._pulse.beat()
        try:
            number = self.signals.get(timeout=_LOOK_S)
        except queue.Empty:
            return False
        for life in self._lives:
            life.tell(number)
        return True

    def _wait(self) -> int:
        """Pass on what still comes until all have ended; return the worst exit code."""
        while any(life.ended() is None for life in self._lives):
            self._pass_on()
        return max(abs(life.ended() or 0) for life in self._lives)


class _Life:
    """One member's processes, one after the other."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._process: subprocess.Popen[bytes] | None = None
        self._began_at = self._start_at = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self.has_served = False

    def start(self, arguments: Sequence[str]) -> None:
        own = ("--member", str(self._member), "--parent", str(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bireme.openai", *arguments, *own],
            start_new_session=True,  # a terminal sends Ctrl-C to a whole group: they would get it twice, and not drain
        )
        self._began_at = time.monotonic()

    def ended(self) -> int | None:
        """Return the exit code of a process that has ended, None while it runs."""
        assert self._process is not None
        self.has_served = self.has_served or self._member.has_begun
        return self._process.poll()

    def revive(self, arguments: Sequence[str]) -> None:
        """Start again, after a pause that doubles with each early death; called until it has happened."""
        now = time.monotonic()
        if not self._start_at:
            if now - self._began_at > _STEADY_S:
                self._pause_s = _FIRST_PAUSE_S
            self._start_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
            logger.error("member_died number=%d restart_in_s=%g", self._member.number, self._start_at - now)
        if now >= self._start_at:
            self._start_at = 0.0
            self.start(arguments)

    def tell(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
