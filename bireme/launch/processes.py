"""Process trees on Linux, from /proc: what runs below a server, and how to end all of it.

Failures to look but "no such file" and "no such process" are raised as OSError.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from bireme.config import instance_name
from bireme.own_process import ENGINE_NAME

_PROC = Path("/proc")
_STUB = "triton_python_backend_stub"
_ENGINE = "bireme.engines.worker"
_GONE = (FileNotFoundError, ProcessLookupError)


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def command_line(pid: int) -> list[str]:
    """Empty when it is gone, or a zombie."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except _GONE:
        return []


def environment(pid: int) -> list[str]:
    """Return NAME=value as of its start. Raises PermissionError for another user's."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")[:-1]
    except _GONE:
        return []


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """Return the kernel's letter (R, S, T, Z, ...); empty: no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def started_at(pid: int) -> int | None:
    """Return the start in clock ticks; None: no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def cpu_ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _stat(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except _GONE:
        return []


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in _listing(_PROC / str(pid) / "task"):
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except _GONE:  # the thread has ended meanwhile
            continue
    return found


def _listing(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except _GONE:
        return []


def descendants(pid: int) -> Iterator[int]:
    """Parents first."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def stubs(server_pid: int) -> dict[str, list[int]]:
    """Return name -> a tritonserver's stubs; a former one may still end."""
    found: dict[str, list[int]] = {}
    for pid in children(server_pid):
        name = stub_name(command_line(pid))
        if name is not None and is_alive(pid):
            found.setdefault(name, []).append(pid)
    return found


def stub_name(arguments: list[str]) -> str | None:
    """Return a stub's name; None: it is no instance of a model.

    .../decode/1/model.py ... decode_0_0 -> decode; generate_0_1, the second instance -> generate_1.
    """
    if not arguments or not arguments[0].endswith(_STUB):
        return None
    paths = (re.search(r"([^/]+)/\d+/[^/]+\.py$", argument) for argument in arguments)
    model = next((match.group(1) for match in paths if match), None)
    return next((name for argument in arguments if model and (name := instance_name(model, argument))), None)


def engines(stub_pid: int) -> list[int]:
    """Of a stub; none while it is down."""
    return [pid for pid in children(stub_pid) if is_engine(pid) and is_alive(pid)]


def is_engine(pid: int) -> bool:
    """A standby (`supervisor.standby`) is none yet."""
    arguments = command_line(pid)
    if not any(_ENGINE in part for part in arguments):
        return False
    return "--standby" not in arguments or _name(pid) == ENGINE_NAME


def _name(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text().strip()
    except _GONE:
        return ""


def survivors(members: Iterable[tuple[int, int | None]]) -> list[int]:
    """Return which (pid, start time) are alive."""
    return [pid for pid, start in members if start is not None and started_at(pid) == start and is_alive(pid)]


def kill_all(members: Iterable[tuple[int, int | None]]) -> list[int]:
    """SIGKILL each (pid, start time) that is the same process; return those."""
    killed = []
    for pid in survivors(members):
        try:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        except ProcessLookupError:
            pass
    return killed


def wait_gone(pids: Iterable[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    left = [pid for pid in pids if is_alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if is_alive(pid)]
    return not left
