"""The arguments of the LLM: the engine YAML's, bireme's defaults, without what a backend can't take.

Pure: dictionaries in, dictionaries out. Mapped keys are warned of here, dropped ones in the check of the YAML
(config.py, rules.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bireme.engines.trtllm.api import BACKENDS
from bireme.engines.trtllm.rules import NOT_IN_AUTODEPLOY
from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines.trtllm")

# Running requests are never evicted; the batch size follows the load, averaged over 128 iterations.
SCHEDULER: dict[str, Any] = {
    "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
    "dynamic_batch_config": {
        "enable_batch_size_tuning": True,
        "enable_max_num_tokens_tuning": False,
        "dynamic_batch_moving_average_window": 128,
    },
}
# TensorRT-LLM's own defaults.
MAX_BATCH_SIZE = 2048
MAX_NUM_TOKENS = 8192
TOKENS_PER_BLOCK = 32
KV_TRANSFER_TIMEOUT_MS = 60_000
_LIMITS = ("max_batch_size", "max_num_tokens", "enable_chunked_prefill")


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
        """1 without attention data parallelism."""
        is_parallel = self.values.get("enable_attention_dp", False)
        return int(self.values.get("tensor_parallel_size") or 1) if is_parallel else 1

    @property
    def has_speculation(self) -> bool:
        return self.values.get("speculative_config") is not None

    @property
    def draft_len(self) -> int:
        """Tokens of a draft at the most; 0: there are none, or their kind does not say."""
        speculation = self.block("speculative_config")
        layers = speculation.get("num_nextn_predict_layers") or 1
        return int(speculation.get("max_draft_len") or (layers if speculation.get("decoding_type") == "MTP" else 0))

    @property
    def has_overlap(self) -> bool:
        """TensorRT-LLM's default: a step begins before the last one's tokens are known."""
        return not self.values.get("disable_overlap_scheduler")

    @property
    def transfer_timeout_ms(self) -> int:
        return int(self.block("cache_transceiver_config").get("kv_transfer_timeout_ms") or KV_TRANSFER_TIMEOUT_MS)

    def block(self, name: str) -> Mapping[str, Any]:
        value = self.values.get(name)
        return value if isinstance(value, Mapping) else {}

    def as_loaded(self, args: Any) -> Arguments:
        """With the limits of a loaded LLM's `args`: AutoDeploy has defaults of its own."""
        found = {name: value for name in _LIMITS if (value := getattr(args, name, None)) is not None}
        return replace(self, values=self.values | found)


def complete(given: Mapping[str, Any], *, takes_pictures: bool = False, traces_endpoint: str = "") -> Arguments:
    """Bireme's defaults are added, and what the backend can't take is fitted. Raises ConfigError.

    `traces_endpoint`: where TensorRT-LLM's own spans go, which need its timings, unless the YAML says otherwise.
    """
    values = dict(given)
    backend = backend_of(values)
    values.pop("backend", None)
    _add_defaults(values, takes_pictures)
    if traces_endpoint:
        values.setdefault("otlp_traces_endpoint", traces_endpoint)
        values.setdefault("return_perf_metrics", True)
    if backend == "_autodeploy":
        _fit_autodeploy(values)
    return Arguments(backend, values)


def backend_of(given: Mapping[str, Any]) -> str:
    """Return the backend that arguments name. Raises ConfigError."""
    backend = given.get("backend") or "pytorch"
    if backend not in BACKENDS:
        raise ConfigError(f"backend: {backend!r}; available backends: {', '.join(BACKENDS)}")
    return str(backend)


def _add_defaults(values: dict[str, Any], takes_pictures: bool) -> None:
    scheduler = dict(values.get("scheduler_config") or {})
    values["scheduler_config"] = SCHEDULER | {name: value for name, value in scheduler.items() if value is not None}
    # A guide is compiled against the tokenizer's vocabulary, and a prompt with pictures is read from text.
    values.setdefault("skip_tokenizer_init", values.get("guided_decoding_backend") is None and not takes_pictures)
    values.setdefault("enable_iter_perf_stats", True)  # the gauges on /metrics come from there
    transceiver = values.get("cache_transceiver_config")
    if isinstance(transceiver, Mapping) and transceiver.get("backend") is not None:
        # 1.2 waits forever by default, and so would the prefill's blocks.
        values["cache_transceiver_config"] = {"kv_transfer_timeout_ms": KV_TRANSFER_TIMEOUT_MS} | dict(transceiver)


def _fit_autodeploy(values: dict[str, Any]) -> None:
    size = values.get("tensor_parallel_size")
    if size is not None and "world_size" not in values:
        values["world_size"] = size
        logger.warning("argument_mapped name=tensor_parallel_size to=world_size value=%s backend=_autodeploy", size)
    for name in ("tensor_parallel_size", *NOT_IN_AUTODEPLOY):  # the check of the YAML has warned of each
        values.pop(name, None)
