"""TensorRT-LLM's worker processes below this one, from /proc: MPI starts them, and their end is not reported."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

_MARK = b"mpi4py"  # in the command line of every process of an MPI pool


def workers_below(root: int | None = None) -> dict[int, int]:
    """Return pid -> start time (clock ticks) of MPI workers among this process's descendants."""
    parents = _parents()
    family = {root or os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family and pid not in family}:
        family |= more
    found = {}
    for pid in family - {root or os.getpid()}:
        started = started_at(pid)
        if started is not None and _MARK in _command(pid):
            found[pid] = started
    return found


def kill(members: Mapping[int, int]) -> int:
    """They hold the GPU that the next life needs."""
    count = 0
    for pid, started in members.items():
        if started_at(pid) == started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                count += 1
    return count


def started_at(pid: int) -> int | None:
    """None: it has ended (a zombie has)."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def has_ended(pid: int, started: int) -> bool:
    """Raises OSError where it can't be known, as without a descriptor left."""
    try:
        fields = _fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] == "Z" or int(fields[19]) != started


def _parents() -> dict[int, int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return {pid: int(fields[1]) for pid in pids if (fields := _stat(pid))}


def _stat(pid: int) -> list[str]:
    try:
        return _fields(pid)
    except OSError:
        return []


def _fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # of every process of the machine: no more than it needs
        return file.read().rpartition(b")")[2].decode().split()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
