"""Whether the engine process lives and advances: arithmetic over time and pongs.

Silence is counted in checks, not by the clock: when this process itself was stopped or starved, the missed time counts
as one interval, so a supervisor that wakes up late kills nothing. Nor does silence count while only the machine holds
the engine up: a process that waits for a CPU answers once it gets one. Past the stall limit any silence is a hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bireme.config import SupervisorConfig
from bireme.messages import Pong

STALL_KEY = "supervisor.stall_timeout_s"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the life must end."""

    cause: str  # hang or stall
    text: str
    still_s: float  # how long nothing has moved


class Heartbeat:
    """One life's. Call `check` about once an interval, `on_frame` at each frame, `on_pong` at each pong."""

    def __init__(
        self,
        config: SupervisorConfig,
        transfer_timeout_s: float = 0.0,
        waits_for_machine: Callable[[], bool] = lambda: False,
        stall_key: str = STALL_KEY,
    ) -> None:
        """`waits_for_machine`: whether what answers pings waits for a CPU or a disk; asked in long silence only."""
        self._stall_key = stall_key
        self._config, self._waits_for_machine = config, waits_for_machine
        self._transfer_timeout_s = transfer_timeout_s  # a request may wait that long for KV without any step
        self._checked_at = time.monotonic()
        self._silent_s = 0.0
        self._held_up_s = 0.0  # of it, by the machine
        self._still_s = 0.0  # work is there and no step is done
        self.idle_ping = 0  # the last one that was answered without work
        self._step = -1
        self._has_work = False
        self._step_age_s = 0.0

    def begin(self) -> None:
        """The engine answers from now on."""
        self._checked_at = time.monotonic()

    def on_frame(self) -> None:
        self._silent_s = self._held_up_s = 0.0

    def on_pong(self, pong: Pong) -> None:
        self.on_frame()
        self._has_work = pong.num_waiting + pong.num_running > 0
        self._step_age_s = pong.step_age_ms / 1e3
        if not self._has_work:
            self.idle_ping = pong.number
        if pong.step != self._step or not self._has_work:
            self._step = pong.step
            self._still_s = 0.0

    def check(self) -> Verdict | None:
        now = time.monotonic()
        passed_s = min(now - self._checked_at, 2 * self._config.ping_interval_s)
        self._checked_at = now
        self._silent_s += passed_s
        self._still_s += passed_s if self._has_work else 0.0
        if self._silent_s > self._config.ping_timeout_s / 2 and self._waits_for_machine():
            self._held_up_s += passed_s
        silent_s, age_s, still_s = self._silent_s, self._step_age_s, self._still_s
        if silent_s - self._held_up_s > self._config.ping_timeout_s:
            return Verdict("hang", f"no answer to pings for {self._config.ping_timeout_s:g} s", silent_s)
        if silent_s > self._config.ping_timeout_s + self._config.stall_timeout_s:
            return Verdict("hang", f"no answer to pings for {silent_s:.1f} s; {self._limit}", silent_s)
        if age_s > self._config.stall_timeout_s:
            return Verdict("stall", f"step {self._step + 1} runs for {age_s:.1f} s; {self._limit}", age_s)
        if age_s == 0 and still_s > self._config.stall_timeout_s + self._transfer_timeout_s:
            text = f"requests are there and no step was done for {still_s:.1f} s; {self._limit}"
            return Verdict("stall", text, still_s)
        return None

    @property
    def _limit(self) -> str:
        return f"{self._stall_key} is {self._config.stall_timeout_s:g}"
