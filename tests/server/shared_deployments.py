"""Deployments of tiny-llama that several test modules share, so that few servers start.

A module that uses one leaves it idle and alive. `ENGINE_text` answer as fast as they can; `ENGINE_paced` make a token
in 20 ms, so that streams are long enough to be cancelled and killed. With `_pair` they are disaggregated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bireme.launch import Server
from tests.contract import stand_in_workers
from tests.servers import start_server

CONTEXT = 512  # tokens, of `ENGINE_text`
STEP_MS = 20
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
    """Return a function: name of a deployment -> its server, which runs until the end of the block."""
    with ExitStack() as stack:

        @functools.cache
        def start(name: str) -> Server:
            env = {"BIREME_KEY": "ab" * 32}  # as serve.py sets it: not a file that can be deleted
            return stack.enter_context(start_server(write_recipe(model, **recipe_of(name)), env=env))

        yield start


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
