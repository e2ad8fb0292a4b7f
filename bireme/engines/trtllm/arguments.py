"""What the LLM is made with: the engine YAML's arguments, bireme's defaults, and what a backend can't take.

Pure: dictionaries in, dictionaries out. What is dropped or mapped has one warning: here, or from the check of
the YAML (rules.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bireme.engines.trtllm.api import BACKENDS
from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines.trtllm")

# AutoDeploy shards by world_size alone, and has a scheduler of its own.
AUTODEPLOY_REFUSES = (
    "build_config",
    "scheduler_config",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
    "cp_config",
)
# Running requests are never evicted; the batch size follows the load, averaged over 128 iterations.
SCHEDULER: dict[str, Any] = {
    "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
    "dynamic_batch_config": {
        "enable_batch_size_tuning": True,
        "enable_max_num_tokens_tuning": False,
        "dynamic_batch_moving_average_window": 128,
    },
}
# TensorRT-LLM's own values of what is not set.
MAX_BATCH_SIZE = 2048
MAX_NUM_TOKENS = 8192
TOKENS_PER_BLOCK = 32
KV_TRANSFER_TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of one LLM, with what the engine itself has to know of them."""

    backend: str
    values: dict[str, Any]

    @property
    def max_batch_size(self) -> int:
        return int(self.values.get("max_batch_size") or MAX_BATCH_SIZE)

    @property
    def max_num_tokens(self) -> int:
        return int(self.values.get("max_num_tokens") or MAX_NUM_TOKENS)

    @property
    def tokens_per_block(self) -> int:
        return int(self.block("kv_cache_config").get("tokens_per_block") or TOKENS_PER_BLOCK)

    @property
    def attention_dp_size(self) -> int:
        """Ranks that hold requests of their own; 1 without attention data parallelism."""
        is_parallel = self.values.get("enable_attention_dp", False)
        return int(self.values.get("tensor_parallel_size") or 1) if is_parallel else 1

    @property
    def has_speculation(self) -> bool:
        return self.values.get("speculative_config") is not None

    @property
    def has_transceiver(self) -> bool:
        return self.block("cache_transceiver_config").get("backend") is not None

    @property
    def transfer_timeout_ms(self) -> int:
        return int(self.block("cache_transceiver_config").get("kv_transfer_timeout_ms") or KV_TRANSFER_TIMEOUT_MS)

    def block(self, name: str) -> Mapping[str, Any]:
        value = self.values.get(name)
        return value if isinstance(value, Mapping) else {}


def complete(given: Mapping[str, Any]) -> Arguments:
    """Add bireme's defaults to the YAML's arguments and fit them to their backend. Raises ConfigError."""
    values = dict(given)
    backend = backend_of(values)
    values.pop("backend", None)
    if values.pop("num_postprocess_workers", None):
        logger.warning("argument_dropped name=num_postprocess_workers reason=%s", "tokens leave the engine as tokens")
    _add_defaults(values)
    if backend == "_autodeploy":
        _fit_autodeploy(values)
    return Arguments(backend, values)


def backend_of(given: Mapping[str, Any]) -> str:
    """Return the backend that arguments name. Raises ConfigError."""
    backend = given.get("backend") or "pytorch"
    if backend not in BACKENDS:
        raise ConfigError(f"backend: {backend!r}; available backends: {', '.join(BACKENDS)}")
    return str(backend)


def _add_defaults(values: dict[str, Any]) -> None:
    scheduler = dict(values.get("scheduler_config") or {})
    values["scheduler_config"] = SCHEDULER | {name: value for name, value in scheduler.items() if value is not None}
    # A guide is compiled against the tokenizer's vocabulary; nothing else here needs a tokenizer.
    values.setdefault("skip_tokenizer_init", values.get("guided_decoding_backend") is None)
    values.setdefault("enable_iter_perf_stats", True)  # the gauges on /metrics come from there
    transceiver = values.get("cache_transceiver_config")
    if isinstance(transceiver, Mapping) and transceiver.get("backend") is not None:
        # 1.2 waits for ever by default, and so would the prefill's blocks.
        values["cache_transceiver_config"] = {"kv_transfer_timeout_ms": KV_TRANSFER_TIMEOUT_MS} | dict(transceiver)


def _fit_autodeploy(values: dict[str, Any]) -> None:
    size = values.get("tensor_parallel_size")
    if size is not None and "world_size" not in values:
        values["world_size"] = size
        logger.warning("argument_mapped name=tensor_parallel_size to=world_size value=%s backend=_autodeploy", size)
        del values["tensor_parallel_size"]
    for name in AUTODEPLOY_REFUSES:  # the check of the YAML has warned of each
        values.pop(name, None)
