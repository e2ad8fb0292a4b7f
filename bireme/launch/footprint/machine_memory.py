"""How much memory this machine has to give: of the host, within the cgroup's limit, and of its GPUs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bireme.engines.torch.geometry import NEWEST, Capability

_PATIENCE_S = 20.0
_CGROUPS = Path("/sys/fs/cgroup")


class VisibleGpu(NamedTuple):
    num_bytes: int
    capability: Capability | None


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes."""

    available: int  # without taking it from anybody; the host's, or less where the cgroup's limit says so
    swap: int = 0  # that is free
    gpus: tuple[int, ...] = ()  # all of each that an engine would see; none: engines compute on the CPU
    capabilities: tuple[Capability, ...] = ()  # the GPUs' compute capabilities; none: the driver does not tell

    def capability(self, gpu: int | None) -> Capability:
        """Return that of a GPU, the newest where it is not known; None: the CPU, which has none."""
        return self.capabilities[gpu] if gpu is not None and gpu < len(self.capabilities) else NEWEST


def read_machine(environment: Mapping[str, str] = os.environ) -> MachineMemory:
    host = _meminfo(Path("/proc/meminfo"))
    room = min([host.get("MemAvailable", 0), *_cgroup_rooms()])
    gpus = _gpus(environment)
    capabilities = tuple(gpu.capability for gpu in gpus if gpu.capability is not None)
    return MachineMemory(
        available=room,
        swap=host.get("SwapFree", 0),
        gpus=tuple(gpu.num_bytes for gpu in gpus),
        capabilities=capabilities if len(capabilities) == len(gpus) else (),
    )


def _meminfo(path: Path) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith("kB"):
                found[name] = int(value.split()[0]) << 10
    return found


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _cgroup_rooms(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield what each limit on the way from this process's cgroup to the root leaves; pages of files give way."""
    try:
        rows = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if controllers == "":
            yield from _rooms(root, path, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _rooms(root / "memory", path, _VERSION_1)


def _rooms(base: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    folder = base / path.strip("/")
    for each in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):  # "max", or the root, which has none
            limit, used = (int((each / name).read_text()) for name in names[:2])
            rows = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
            yield max(0, limit - used + int(rows.get(names[2], 0)))
        if each == base:
            return


def _gpus(environment: Mapping[str, str]) -> list[VisibleGpu]:
    """Return each GPU that the engines' torch would compute on."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible in ("", "-1") or _is_torch_without_cuda():
        return []
    # Drivers before 510 refuse a query that names compute_cap.
    found: dict[str, VisibleGpu] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        basic = "index,uuid,memory.total"
        found = _gpus_by_name(program, f"{basic},compute_cap") or _gpus_by_name(program, basic)
    names = visible.split(",") if visible else [name for name in found if name.isdigit()]
    return [found[name] for name in names if name in found]


def _gpus_by_name(program: str, query: str) -> dict[str, VisibleGpu]:
    """Return each GPU by its number and by its UUID; none where the driver refuses. Raises what subprocess does."""
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    found = {}
    for line in done.stdout.splitlines() if not done.returncode else ():
        index, uuid, size, *rest = line.replace(" ", "").split(",")
        major, _, minor = rest[0].partition(".") if rest else ("", "", "")
        capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
        found[index] = found[uuid] = VisibleGpu(int(size) << 20, capability)
    return found


def _is_torch_without_cuda() -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch").endswith("+cpu")
    return False
