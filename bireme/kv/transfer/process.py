"""Whether another process of this host still lives, without being its parent."""

from __future__ import annotations

from pathlib import Path


class Process:
    """A process that was alive once. A zombie counts as dead, and so does a later process with the same id."""

    __slots__ = ("_started", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _start_time(pid)

    def is_alive(self) -> bool:
        return self._started is not None and _start_time(self.pid) == self._started


def _start_time(pid: int) -> str | None:
    """Return the start time in ticks since boot, as text; None: no such process, or it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in "ZXx" else fields[19]
