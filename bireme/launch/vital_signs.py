"""Whether a process hangs, judged by the kernel's figures: one that is only slow is never taken for hung.

A process is hung when
    it is stopped (SIGSTOP), for STOPPED_S; one that a debugger holds is not
    it has given no sign of life for SILENT_S, and meanwhile hardly used a CPU, nor ever waited for one
    it has given no sign of life for the stall limit, even if it uses CPU: it loops
Time in which the watcher did not run does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from bireme.child_process import has_waiting_thread
from bireme.launch import processes

STOPPED_S = SILENT_S = 5.0
NOTICED_S = 4.0  # of silence: not ready
_LONGEST_LOOK_S = 1.0  # the time between two looks counts as this much at most
_IDLE_SHARE = 0.02  # of one CPU: threads that only wake up to check use less
_TICKS_S = os.sysconf("SC_CLK_TCK")


class VitalSigns:
    """Of one process. `look` regularly."""

    def __init__(self, pid: int, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.pid = pid
        self._stall_s = stall_s
        self._clock = clock
        self._looked_at = clock()
        self._sign: int | None = None
        self._stopped_s = 0.0
        self.silent_s = 0.0
        self._ticks = processes.cpu_ticks(pid)  # at the last sign of life
        self._has_waited = False  # for a CPU or a disk, since then

    def look(self, sign: int | None) -> None:
        """`sign`: a number that moves while the process lives; None: it shows none, and silence means nothing."""
        now = self._clock()
        passed_s, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        self._stopped_s = self._stopped_s + passed_s if processes.state(self.pid) == "T" else 0.0
        if sign is None or sign != self._sign:
            self._sign, self.silent_s, self._has_waited = sign, 0.0, False
            self._ticks = processes.cpu_ticks(self.pid)
            return
        self.silent_s += passed_s
        if self.silent_s > 2 * _LONGEST_LOOK_S and not self._has_waited:
            self._has_waited = has_waiting_thread(self.pid)

    @property
    def problem(self) -> str:
        """Why it can't be serving."""
        if processes.state(self.pid) == "T":
            return f"process {self.pid} is stopped"
        if self.silent_s >= NOTICED_S:
            return f"process {self.pid} has given no sign of life for {self.silent_s:.0f} s"
        return ""

    @property
    def hung(self) -> str:
        """Why it will not go on by itself."""
        if self._stopped_s >= STOPPED_S:
            return f"stopped for {self._stopped_s:.0f} s"
        if self.silent_s >= self._stall_s:
            return f"no sign of life for {self.silent_s:.0f} s"
        if self.silent_s >= SILENT_S and not self._has_waited and self._used_s() < _IDLE_SHARE * self.silent_s:
            return f"no sign of life for {self.silent_s:.0f} s, and no work either"
        return ""

    def _used_s(self) -> float:
        return (processes.cpu_ticks(self.pid) - self._ticks) / _TICKS_S
