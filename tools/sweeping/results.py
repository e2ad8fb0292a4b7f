"""The folder of a sweep: its plan, a JSON for each run, logs. A run is there as a whole, or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bireme.errors import ConfigError
from bireme.sizing.figures import Figures
from tools.sweeping.gpus import Share
from tools.sweeping.matrix import Cell, Deployment, Plan

_PLAN = "plan.json"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One cell, measured or not."""

    format: Literal["bireme.sweep_run.v1"] = "bireme.sweep_run.v1"
    cell: Cell
    deployment: Deployment
    state: Literal["measured", "failed"]
    reason: str = ""  # of a failure
    figures: Figures | None = None  # None: failed
    share: Share | None = None  # None: the launch did not come up
    tokens_per_s_per_gpu: float | None = None  # or per worker: share.unit
    tool: str = ""  # that made the load, with its version
    command: tuple[str, ...] = ()  # of the load
    began_at: str = ""
    sweep_began_at: str = ""  # the sweep, or its resuming, in which this was measured
    seconds: float = 0.0  # with warm-up and the tool's own start
    clock: str = ""  # of the GPUs at the end
    commit: str = ""
    launch_settings: tuple[str, ...] = ()  # with the GPUs that engines were given


class Results:
    """Owns the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = folder / "runs"
        self._claim = -1  # a descriptor that is never closed

    def check_new(self) -> None:
        """Raises ConfigError where a sweep is there already."""
        if (self.folder / _PLAN).exists():
            raise ConfigError(
                f"--out {self.folder}: a sweep is there; --resume {self.folder} goes on with it, or name another folder"
            )
        if any(self._runs.glob("*.json")):
            raise ConfigError(f"--out {self.folder}: runs of another sweep are there; name another folder")

    def begin(self, plan: Plan) -> None:
        """Raises ConfigError."""
        try:
            self._make_folders()
        except OSError as error:
            raise ConfigError(f"--out {self.folder}: can't be made ({error.strerror}); name another folder") from error
        self.claim()
        self.check_new()  # another sweep may have begun and ended since
        self.keep(plan)

    def claim(self) -> None:
        """Keep others from measuring into the folder as long as this process lives. Raises ConfigError."""
        self._claim = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._claim)
            raise ConfigError(f"{self.folder}: another sweep measures into it; wait until it has ended") from error

    def keep(self, plan: Plan) -> None:
        write(self.folder / _PLAN, msgspec.json.format(msgspec.json.encode(plan)))

    def plan(self) -> Plan:
        """Return that of a sweep to go on with. Raises ConfigError."""
        try:
            plan = msgspec.json.decode((self.folder / _PLAN).read_bytes(), type=Plan)
            self._make_folders()
        except OSError as error:
            raise ConfigError(
                f"--resume {self.folder}: no {_PLAN} there ({error.strerror}); name the folder of a sweep's --out"
            ) from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"--resume {self.folder}/{_PLAN}: not a plan of this version ({error})") from error
        return plan

    def _make_folders(self) -> None:
        for name in ("runs", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def save(self, run: Run) -> None:
        write(self._runs / f"{run.cell.slug}.json", msgspec.json.format(msgspec.json.encode(run)))

    def read(self, cell: Cell) -> Run | None:
        """Return a cell's run; None: there is none, none that can be read, or one of another matrix."""
        try:
            run = msgspec.json.decode((self._runs / f"{cell.slug}.json").read_bytes(), type=Run)
        except (OSError, msgspec.DecodeError):
            return None
        return run if run.cell == cell else None

    def read_all(self, plan: Plan) -> list[Run]:
        return [run for cell in plan.cells if (run := self.read(cell)) is not None]

    def left(self, plan: Plan) -> list[Cell]:
        """Return the cells that have not been measured; those that failed are tried again."""
        return [cell for cell in plan.cells if (run := self.read(cell)) is None or run.state != "measured"]

    def new_load_folder(self, cell: Cell) -> Path:
        """Return an empty folder: an export of an earlier try must not be taken for this one's."""
        folder = self.folder / cell.load / cell.slug
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def write_summary(self, runs: Sequence[Run], machine: dict[str, Any]) -> Path:
        """Write all runs into one JSON."""
        path = self.folder / "results.json"
        summary = {"format": "bireme.sweep.v1", "machine": machine, "runs": msgspec.to_builtins(runs)}
        write(path, json.dumps(summary, indent=2).encode())
        return path


def write(path: Path, content: bytes) -> None:
    """Replace a file as a whole."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(content)
    draft.replace(path)


def this_machine() -> dict[str, Any]:
    return {"system": platform.platform(), "cores": os.cpu_count()}
