"""Whether another process still lives: one of this host, without being its parent, or one of another host."""

from __future__ import annotations

import time
from pathlib import Path

SILENCE_S = 3.0  # a process of another host that says nothing for so long, though it is asked, counts as dead


class Process:
    """A process that was alive once. A zombie counts as dead, and so does a later process with the same id."""

    __slots__ = ("_started", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _start_time(pid)

    def is_alive(self) -> bool:
        return self._started is not None and _start_time(self.pid) == self._started

    def note_message(self) -> None: ...


class FarProcess:
    """A process of another host: its messages are all that is known of it."""

    __slots__ = ("_seen_at", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._seen_at = time.monotonic()

    def is_alive(self) -> bool:
        return time.monotonic() - self._seen_at < SILENCE_S

    def note_message(self) -> None:
        self._seen_at = time.monotonic()


def _start_time(pid: int) -> str | None:
    """Return the start time in ticks since boot, as text; None: no such process, or it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in "ZXx" else fields[19]
