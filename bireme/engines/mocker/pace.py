"""The mocker's clock: steps end at absolute deadlines, so that their pace does not drift.

It stands for a GPU, which keeps its pace while CPUs are busy. Where the kernel allows it (CAP_SYS_NICE) its thread is a
real-time one: an ordinary one waited 2-6 ms for a CPU in every 30th step, beside the stubs of 256 streams on two cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time

_COARSE_S = 0.02  # longer waits than this can be interrupted
_PR_SET_TIMERSLACK = 29


class Pace:
    """Used from the engine's thread alone."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._due_at = 0.0  # end of the last step; 0: idle since

    @property
    def is_idle(self) -> bool:
        return not self._due_at

    def sharpen(self, step_ms: float) -> None:
        """The kernel's slack of 50 us shows in every step. Without a pace or on one CPU real time starves others."""
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
        if step_ms > 0 and len(os.sched_getaffinity(0)) > 1:
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))

    def rest(self) -> None:
        self._due_at = 0.0

    def step(self, began: float, duration_s: float) -> None:
        """Up to one step of lateness is made up, more is dropped."""
        self._due_at = max((self._due_at or began) + duration_s, began)
        left = self._due_at - time.monotonic()
        if left > _COARSE_S:
            self._stopping.wait(left - _COARSE_S / 2)
            left = self._due_at - time.monotonic()
        if left > 0:  # a sleep of nothing takes as long as a step without a pace: some 30 us on a virtual machine
            time.sleep(left)
