"""The python of an engine process, and its environment."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from bireme.config import CHECKOUT, Recipe, WorkerEntry, stage_of
from bireme.errors import ConfigError
from bireme.recipe_files import load_recipe

RECIPE_VARIABLE = "BIREME_ENGINE_RECIPE"
PYTHON_VARIABLE = "BIREME_ENGINE_PYTHON"
# What LD_LIBRARY_PATH was before a launch put the libraries of its tritonserver there: an engine gets that one back.
LIBRARY_PATH_VARIABLE = "BIREME_LIBRARY_PATH"
# Threads of a parallel part look for the next one for some 40 us before they sleep: a decoder's step has 60 of them,
# and waking a thread takes longer than what lies between two. An idle engine's threads sleep.
OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
# oneDNN and torch keep a compiled product for each shape and number of rows, of 0.4 to 1.3 MiB: 1,024 as they come.
PRODUCTS = dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "128")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def find_python(environment: Mapping[str, str] = os.environ) -> str:
    """BIREME_ENGINE_PYTHON, else this environment's, else PATH's. Raises ConfigError.

    `sys.executable` is of no use inside a Triton stub, which embeds its interpreter.
    """
    if named := environment.get(PYTHON_VARIABLE):
        if found := shutil.which(named, path=environment.get("PATH")):
            return found
        raise ConfigError(f"{PYTHON_VARIABLE}: {named} is not an executable; name the engine environment's python")
    for name in ("python3", "python"):
        candidate = Path(sys.prefix) / "bin" / name
        if os.access(candidate, os.X_OK):
            return str(candidate)
    if found := shutil.which("python3", path=environment.get("PATH")):
        return found
    raise ConfigError(f"no python3 in {sys.prefix}/bin or on PATH; set {PYTHON_VARIABLE}")


def engine_environment(
    recipe: Recipe, worker: str, run_dir: Path, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The recipe's `env` wins over everything but the run folder and recipe. Raises ConfigError.

    The recipe travels whole: a restarted engine serves what its stub loaded. BIREME_ENGINE_PYTHON, which may be in the
    recipe's `env`, gives a worker an environment, whose programs its libraries call.
    """
    entry = recipe.entry(worker)
    assert entry is not None, f"{worker} is not in recipe {recipe.name}"
    result = child_environment(num_threads(recipe, entry), base)
    if entry.devices:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices_of(entry, worker)))
    result |= entry.env
    if PYTHON_VARIABLE in result:
        programs = Path(find_python(result)).parent
        result["PATH"] = os.pathsep.join(filter(None, (str(programs), result.get("PATH"))))
    return result | {"BIREME_RUN_DIR": str(run_dir), RECIPE_VARIABLE: msgspec.json.encode(recipe).decode()}


def given_recipe(worker: str) -> tuple[Recipe, WorkerEntry]:
    """What a supervisor handed over, else what the environment names. Raises ConfigError."""
    text = os.environ.get(RECIPE_VARIABLE)
    recipe = msgspec.json.decode(text, type=Recipe) if text else load_recipe()
    if (entry := recipe.entry(worker)) is None:
        raise ConfigError(f"{worker} is not in recipe {recipe.name}; workers: {', '.join(recipe.workers)}")
    return recipe, entry


def child_environment(threads: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """CPU threads that sleep when idle, products that are kept, and this package."""
    result = PRODUCTS | {name: value for name, value in base.items() if name != "PYTHONHOME"}
    if (libraries := result.pop(LIBRARY_PATH_VARIABLE, None)) is not None:
        result.pop("LD_LIBRARY_PATH", None)
        result |= {"LD_LIBRARY_PATH": libraries} if libraries else {}
    result |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    result |= OPENMP | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if path := _package_path(base.get("PYTHONPATH", "")):
        result["PYTHONPATH"] = path
    return result


def num_threads(recipe: Recipe, entry: WorkerEntry) -> int:
    """Unset, an equal share of the cores among the recipe's engines."""
    if entry.num_threads is not None:
        return max(1, entry.num_threads)
    engines = sum(worker.replicas for worker in recipe.workers.values())
    return max(1, usable_cores() // max(1, engines))


def usable_cores() -> int:
    """By its affinity, or less where a cgroup's quota is smaller."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def devices_of(entry: WorkerEntry, worker: str) -> tuple[int, ...]:
    """Equal runs, or round robin when there are fewer GPUs than replicas."""
    replica = 0 if worker == stage_of(worker) else int(worker.rpartition("_")[2])
    share = len(entry.devices) // entry.replicas
    if share == 0:
        return (entry.devices[replica % len(entry.devices)],)
    return entry.devices[replica * share : (replica + 1) * share]


def gpu_neighbors(recipe: Recipe, worker: str) -> tuple[float, ...]:
    """Return free_gpu_memory_fraction of each other engine on a torch engine's GPU."""
    used = {
        name: (entry, set(devices_of(entry, name)) if entry.devices else {0})
        for stage, entry in recipe.workers.items()
        for name in recipe.replicas(stage)
        if entry.kind.needs_model
    }
    mine = min(used[worker][1]) if worker in used else -1
    return tuple(
        entry.engine_config.kv_cache_config.free_gpu_memory_fraction
        for name, (entry, devices) in used.items()
        if name != worker and mine in devices
    )


def _package_path(inherited: str) -> str:
    """Put the checkout first. An installed package's folder is left out: it also holds the stub's numpy."""
    if not (CHECKOUT / "pyproject.toml").exists():
        return inherited
    return os.pathsep.join(filter(None, (str(CHECKOUT), inherited)))
