"""What a server's processes cost: CPU, memory, shared memory, by role."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from bireme.launch.processes import command_line, descendants, is_alive, stub_name

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHM = Path("/dev/shm")
FOREIGN = "foreign"


def roles(server_pid: int) -> dict[str, int]:
    """Return role -> pid of a server's tree: server, decode.stub, decode.engine, ..."""
    found = {"server": server_pid}
    for pid in descendants(server_pid):
        arguments = command_line(pid)
        if model := stub_name(arguments):
            found[f"{model}.stub"] = pid
        elif "bireme.engines.worker" in arguments:
            found[f"{arguments[arguments.index('--worker') + 1]}.engine"] = pid
    return found


def parent(pid: int) -> int:
    return int(_stat(pid)[1])


def alive(processes: Mapping[str, int]) -> dict[str, int]:
    return {role: pid for role, pid in processes.items() if is_alive(pid)}


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far, its threads included; 0 when it is gone."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_bytes(pid: int) -> int:
    """Return the resident memory without shared pages (shm pools and libraries); 0 when the process is gone."""
    try:
        resident, shared = (Path(f"/proc/{pid}/statm").read_text().split())[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def shm_bytes(prefix: str = "") -> int:
    """Return the bytes in use in /dev/shm by files with this name prefix; of all without one."""
    total = 0
    for path in _SHM.glob(f"{prefix}*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:  # gone meanwhile
            continue
    return total


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def busy_s() -> float:
    """Return the CPU seconds that the whole machine was not idle so far, time stolen by its host included."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / _TICKS_PER_S


class CpuMeter:
    """CPU shares (cores) of some processes since it was made."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = dict(processes)
        self._before = {role: cpu_s(pid) for role, pid in self._processes.items()}
        self._busy_before_s = busy_s()
        self._began_at = time.monotonic()

    def cores(self) -> dict[str, float]:
        """Return role -> cores; FOREIGN is what the rest of the machine took."""
        wall = max(time.monotonic() - self._began_at, 1e-9)
        used = {role: (cpu_s(pid) - self._before[role]) / wall for role, pid in self._processes.items()}
        used[FOREIGN] = max((busy_s() - self._busy_before_s) / wall - sum(used.values()), 0.0)
        return {role: round(share, 3) for role, share in used.items()}
