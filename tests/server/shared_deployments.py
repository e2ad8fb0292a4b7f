"""Aggregated deployments of tiny-llama that several test modules share, so that few servers start.

A module that uses one leaves it idle and alive. `..._text` answer as fast as they can; `..._paced` make a token in
20 ms, so that streams are long enough to be cancelled and killed.
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

CONTEXT = 512  # tokens, of `..._text`
STEP_MS = 20

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
            return stack.enter_context(start_server(write_recipe(model, **recipe_of(name))))

        yield start


def _workers(name: str) -> dict[str, Any]:
    """Return the one worker entry of a deployment."""
    if name == "torch_text":
        return {"engine": "torch", "num_threads": 1, "engine_config": _TEXT}
    if name == "trtllm_text":
        return stand_in_workers.worker(_TEXT | {"guided_decoding_backend": "xgrammar"})
    if name == "mocker_paced":
        pace = {"step_ms": STEP_MS, "prefill_ms": STEP_MS}
        return {"engine": "mocker", "engine_config": _PACED | {"mocker": pace}}
    assert name == "trtllm_paced", name
    return stand_in_workers.worker(_PACED | {"dtype": "float32"}, STEP_MS=str(STEP_MS))


def recipe_of(name: str) -> dict[str, Any]:
    """Return workers and further keys of recipe.yaml."""
    recipe: dict[str, Any] = {"workers": {"decode": _workers(name)}}
    if name.endswith("paced"):
        recipe |= faults_keys("trtllm" if name.startswith("trtllm") else "mocker", migration_limit=3)
    return recipe


def faults_keys(engine: str, migration_limit: int) -> dict[str, Any]:
    """Return what lets a killed or stopped engine be noticed and started again within a test."""
    loads = engine == "trtllm"  # a stand-in engine loads a model when it starts again
    return {
        "pipeline": {"migration_limit": migration_limit, "stall_timeout_s": 90 if loads else 45},
        "supervisor": {"ping_timeout_s": 5.0 if loads else 1.0, "max_restarts": 50},
    }
