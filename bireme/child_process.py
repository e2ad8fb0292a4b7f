"""Child processes: how they are started and ended, and how long to wait before the next one.

A child gets a session of its own: Ctrl-C in a terminal reaches its parent alone, and its own children are killed with
it. Whether it ends with its parent is up to it (own_process.py); a death signal follows the thread that forks, so that
must be a permanent one.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

_LOOK_S = 0.01
_MAX_DOUBLINGS = 64


class ChildProcess:
    """One running program. Until `reap` or `exit_code` it stays a zombie, so that its group can still be named."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        pass_fds: Sequence[int] = (),
        output: int | None = None,  # of stdout and stderr together: subprocess.PIPE; None: this process's
    ) -> None:
        """Start it. Raises OSError."""
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.lines = self._process.stdout

    @property
    def exit_code(self) -> int | None:
        """Return the negative signal or the status; None while it runs."""
        return self._process.poll()

    @property
    def has_exited(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it has been reaped
            return True

    def signal(self, number: int) -> None:
        """Signal it alone."""
        if not self.has_exited:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it and all that it started; from any thread."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended within the time."""
        deadline = time.monotonic() + timeout_s
        while not (has_exited := self.has_exited) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return has_exited

    def reap(self) -> int:
        """Kill the rest of it and return its exit code."""
        self.kill()
        return self._process.wait()


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped it; false for one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in ("T", "t")
    return False


def has_waiting_thread(pid: int, but: int = 0) -> bool:
    """Return whether a thread, other than `but`, waits for a CPU or a disk, so that only the machine holds it up.

    False as well for a process that is gone. Raises OSError where /proc can't be read.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
                state = (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state in ("R", "D") and task.name != str(but):
                    return True
    return False


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class Backoff:
    """Pauses before starts, each twice as long as the one before it."""

    def __init__(
        self, first_s: float, longest_s: float, *, limit: int | None = None, window_s: float = math.inf
    ) -> None:
        """`limit`: starts in `window_s`, which is also how long one counts; None: any number."""
        self._first_s, self._longest_s, self._window_s = first_s, longest_s, window_s
        self._limit = limit
        self._starts: deque[float] = deque(maxlen=_MAX_DOUBLINGS if limit is None else limit)

    def next_s(self) -> float:
        """Count a start and return the seconds to wait before it; infinite: it would be one too many."""
        now = time.monotonic()
        while self._starts and now - self._starts[0] > self._window_s:
            self._starts.popleft()
        if len(self._starts) == self._limit:
            return math.inf
        pause_s = min(self._longest_s, self._first_s * 2.0 ** min(len(self._starts), _MAX_DOUBLINGS))
        self._starts.append(now)
        return pause_s

    def reset(self) -> None:
        """The last start went well: the next pause is short again."""
        self._starts.clear()
