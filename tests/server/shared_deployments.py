"""Deployments of tiny-llama that several test modules share, so that few servers start.

A module that uses one leaves it idle and alive. A server that does not answer all the same is told and replaced, as a
launch would: the test that met it fails, and no other. `ENGINE_text` answer as fast as they can; `ENGINE_paced` make a
token in 20 ms, so that streams are long enough to be cancelled and killed. With `_pair` they are disaggregated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bireme.errors import BiremeError
from bireme.launch import Server, processes
from tests.contract import stand_in_workers
from tests.servers import start_server

CONTEXT = 512  # tokens, of `ENGINE_text`
STEP_MS = 20
_PATIENT_S = 60.0  # one that is only busy has answered by then
LEASE_S = 3.0  # of the prompts that a pair's prefill holds

_TEXT = {
    "dtype": "float32",
    "max_batch_size": 32,
    "max_num_tokens": 256,  # long prompts are prefilled in chunks
    "max_seq_len": CONTEXT,
    "kv_cache_config": {"tokens_per_block": 32, "max_tokens": 32768},
}
_PACED = {"max_batch_size": 256, "kv_cache_config": {"max_tokens": 1 << 20}}


Start = Callable[[str], Server]


@contextmanager
def starting(model: Path, write_recipe: Callable[..., Path]) -> Iterator[Start]:
    """Return a function: name of a deployment -> its server, which runs until the end of the block or its own."""
    servers: dict[str, Server] = {}
    with ExitStack() as stack:

        def start(name: str) -> Server:
            if name in servers and not _answers(servers[name]):
                warnings.warn(f"{name} does not answer and is replaced\n{_state(servers[name])}", stacklevel=1)
                servers.pop(name).kill()
            if name not in servers:
                env = {"BIREME_KEY": "ab" * 32}  # as serve.py sets it: not a file that can be deleted
                servers[name] = stack.enter_context(start_server(write_recipe(model, **recipe_of(name)), env=env))
            return servers[name]

        yield start


def _answers(server: Server) -> bool:
    with suppress(BiremeError):
        return bool(server.admin.metrics_text(_PATIENT_S))
    return False


def _state(server: Server) -> str:
    """What its threads wait for, and the end of its log."""
    lines = [f"exit code {server.returncode}"]
    for thread in sorted(Path(f"/proc/{server.pid}/task").glob("*")):
        told = [thread.name, processes.state(int(thread.name))]
        for name in ("comm", "wchan", "syscall"):
            with suppress(OSError):  # it has ended, or the machine does not tell
                told.append((thread / name).read_text().strip())
        lines.append(" ".join(told))
    return "\n".join([*lines, server.tail()])


def recipe_of(name: str, migration_limit: int = 3) -> dict[str, Any]:
    """Return workers and further keys of recipe.yaml."""
    engine, speed, *is_pair = name.split("_")
    config = dict(_TEXT if speed == "text" else _PACED)
    if is_pair:
        config["cache_transceiver_config"] = {"backend": "DEFAULT", "kv_transfer_timeout_ms": int(1e3 * LEASE_S)}
    worker = _worker(engine, speed, config)
    recipe: dict[str, Any] = {"workers": {"prefill": worker, "decode": worker} if is_pair else {"decode": worker}}
    return recipe | faults_keys(engine, migration_limit) if speed == "paced" else recipe


def _worker(engine: str, speed: str, config: dict[str, Any]) -> dict[str, Any]:
    if engine == "torch":
        return {"engine": "torch", "num_threads": 1, "engine_config": config}
    if engine == "mocker":
        pace = {"step_ms": STEP_MS, "prefill_ms": STEP_MS}
        return {"engine": "mocker", "engine_config": config | {"mocker": pace}}
    if speed == "text":
        return stand_in_workers.worker(config | {"guided_decoding_backend": "xgrammar"})
    return stand_in_workers.worker(config | {"dtype": "float32"}, STEP_MS=str(STEP_MS))


def faults_keys(engine: str, migration_limit: int) -> dict[str, Any]:
    """Return what lets a killed or stopped engine be noticed and started again within a test."""
    loads = engine == "trtllm"  # a stand-in engine loads a model when it starts again
    return {
        "pipeline": {"migration_limit": migration_limit, "stall_timeout_s": 90 if loads else 45},
        "supervisor": {"ping_timeout_s": 5.0 if loads else 1.0, "max_restarts": 50},
    }
