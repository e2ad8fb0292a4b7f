"""GPUs of a launch: how many it takes, which each engine gets, and at which clock they run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bireme.config import Recipe
from bireme.engines.trtllm.config import prepared
from bireme.engines.trtllm.engine_yaml import Yaml
from bireme.errors import ConfigError

_SMI_S = 20.0


class Share(msgspec.Struct, frozen=True):
    """What the tokens/s of a launch are divided by."""

    count: int
    unit: str  # GPU; worker: nothing of the launch uses a GPU, so each worker counts as one


def share_of(document: Mapping[str, Any], recipe: Recipe) -> Share:
    """Return the GPUs that the engines of a launch use, of what serve.py --dump-config-to has written of it."""
    workers: Mapping[str, Mapping[str, Any]] = document["settled"]["workers"]
    hidden = document["environment"].get("CUDA_VISIBLE_DEVICES") == ""
    num_here = 0 if hidden else len(document["machine"].get("gpus") or ())
    used: set[int] = set()
    for name, worker in workers.items():
        entry = recipe.entry(name)
        assert entry is not None, f"{name} is no worker of {recipe.name}"
        size = engine_gpus(recipe, name) if num_here else 0
        given = range(num_here) if worker["devices"] == "all" else worker["devices"]
        used.update(list(given)[:size])
    return Share(len(used), "GPU") if used else Share(len(workers), "worker")


def engine_gpus(recipe: Recipe, worker: str) -> int:
    """Return how many one engine takes, where there are any."""
    entry = recipe.entry(worker)
    assert entry is not None, f"{worker} is no worker of {recipe.name}"
    if not entry.kind.needs_model:
        return 0
    if not entry.kind.has_llm_args:
        return 1
    yaml = Yaml(prepared(entry.engine_config.llm_args), worker, entry.engine_version or "1.2", is_disaggregated=False)
    return yaml.world_size


def placement(recipe: Recipe, num_here: int) -> tuple[str, ...]:
    """Return settings that give each engine GPUs of its own, stage after stage; none where the recipe names them.

    Raises ConfigError for more than there are.
    """
    if not num_here or any(entry.devices for entry in recipe.workers.values()):
        return ()
    settings, first = [], 0
    for stage, entry in recipe.workers.items():
        end = first + engine_gpus(recipe, stage) * entry.replicas
        if end > first:
            settings.append(f"workers.{stage}.devices={list(range(first, end))}")
        first = end
    if first > num_here:
        raise ConfigError(f"{recipe.name}: its workers take {first} GPUs, this machine has {num_here}; ask for fewer")
    return tuple(settings)


def num_gpus() -> int:
    """Return those of this machine, as nvidia-smi lists them."""
    status, text = _smi("--query-gpu=index", "--format=csv,noheader")
    return len(text.splitlines()) if status == 0 else 0


@dataclass(slots=True)
class Clocks:
    """The clock of the GPUs while a sweep runs, and what is said of it."""

    wanted_mhz: int
    is_locked: bool = False
    told: str = ""

    def lock(self) -> None:
        """Set it where that is wanted and allowed."""
        if shutil.which("nvidia-smi") is None:
            self.told = "not set, there is no nvidia-smi here"
            return
        if not self.wanted_mhz:
            self.told = f"as they were: {self.now()}"
            return
        status, text = _smi(f"--lock-gpu-clocks={self.wanted_mhz},{self.wanted_mhz}")
        self.is_locked = status == 0
        self.told = f"locked to {self.wanted_mhz} MHz" if self.is_locked else f"not set, {_last_line(text)}"

    def unlock(self) -> None:
        if self.is_locked:
            status, text = _smi("--reset-gpu-clocks")
            self.is_locked = False
            if status:
                self.told += f", and still is ({_last_line(text)}); nvidia-smi --reset-gpu-clocks frees it"

    @staticmethod
    def now() -> str:
        """Return what they run at: MHz, one GPU after the other; "" where none tells."""
        status, text = _smi("--query-gpu=clocks.sm", "--format=csv,noheader,nounits")
        return ", ".join(text.split()) + " MHz" if status == 0 and text.strip() else ""


def _smi(*arguments: str) -> tuple[int, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 1, "there is no nvidia-smi here"
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_SMI_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return 1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def _last_line(text: str) -> str:
    lines: Sequence[str] = text.splitlines()
    return lines[-1] if lines else "nvidia-smi gave no reason"
