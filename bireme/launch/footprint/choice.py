"""What serve.py --model serves a model with: the dtype, context and KV pool that fit this machine, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bireme.config import Recipe
from bireme.launch.footprint.engine_footprint import EngineFootprint
from bireme.launch.footprint.launch_footprint import LaunchFootprint, WorkerFootprint
from bireme.launch.footprint.machine_memory import MachineMemory

_STUBS = 8  # of a recipe that serve.py makes
_POOL_SHARE = 0.8  # of what weights, processes and steps leave: other programs have their turns, too
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class FittingConfig:
    config: dict[str, dict[str, Any]]  # stage -> keys of its engine_config
    says: str


def choose(recipe: Recipe, machine: MachineMemory) -> FittingConfig | None:
    """Return what is set where the recipe sets nothing; None: its engines can't be counted."""
    footprint = LaunchFootprint(recipe, machine, _STUBS)
    counted = [(worker, worker.engine) for worker in footprint.workers if worker.engine is not None]
    if not counted:
        return None
    on_host = sum(worker.count for worker, _ in counted if worker.gpu is None)
    room = int((machine.available - footprint.certain_bytes) / max(1, on_host) * _POOL_SHARE)
    found = {worker.stage: _config(recipe, worker, engine, room) for worker, engine in counted}
    worker, engine = counted[-1]
    return FittingConfig(found, _says(recipe, worker, engine, found[worker.stage], machine))


def _config(recipe: Recipe, worker: WorkerFootprint, engine: EngineFootprint, room: int) -> dict[str, Any]:
    asked, size = recipe.workers[worker.stage].engine_config, engine.limits.tokens_per_block
    config: dict[str, Any] = {}
    tokens = engine.pool_tokens
    if worker.gpu is None and asked.kv_cache_config.max_tokens is None:
        # A sequence as long as the model allows, where the usual pool holds less; whole blocks, one more is padding.
        wanted = max(tokens, -(-engine.limits.max_seq_len // size) * size)
        most = ((room - engine.step) // engine.bytes_per_token // size - 1) * size
        if size < (fitting := min(wanted, most)) != tokens:
            config["kv_cache_config"] = {"max_tokens": fitting}
            tokens = fitting
    if asked.max_seq_len is None and size <= tokens < engine.limits.max_seq_len:
        config["max_seq_len"] = tokens
    if asked.dtype == "auto" and worker.gpu is None and engine.load > room and engine.dtype == "float32":
        config["dtype"] = "bfloat16"  # slower on this CPU, and a load takes half
    return config


def _says(
    recipe: Recipe, worker: WorkerFootprint, engine: EngineFootprint, config: dict[str, Any], machine: MachineMemory
) -> str:
    asked = recipe.workers[worker.stage].engine_config
    dtype, why = config.get("dtype", engine.dtype), "of config.json, as this machine computes it"
    if "dtype" in config:
        why = f"a load in {engine.dtype} takes {(engine.weights + engine.load) // _MIB:,} MiB"
    elif asked.dtype != "auto":
        why = "as asked"
    tokens = config.get("kv_cache_config", {}).get("max_tokens", engine.pool_tokens)
    context, longest = config.get("max_seq_len", engine.limits.max_seq_len), engine.limits.max_seq_len
    room = machine.available if worker.gpu is None else machine.gpus[worker.gpu]
    shortened = f" of {longest:,}, which do not fit" if context < longest else " as asked" * bool(asked.max_seq_len)
    return (
        f"{dtype} ({why}), a context of {context:,} tokens{shortened}, KV for {tokens:,} at"
        f" {engine.bytes_per_token:,} bytes each: weights take {engine.weights // _MIB:,} of {room // _MIB:,} MiB"
    )
