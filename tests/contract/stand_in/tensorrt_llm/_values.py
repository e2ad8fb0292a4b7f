"""What goes with a request, and the errors: plain classes with the contract's fields and rules."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

from tensorrt_llm import _contract

DEFAULT_REQUEST_PRIORITY = 0.5


class RequestError(RuntimeError):
    """This request is at fault, not the engine."""


class EngineDeadError(RuntimeError):
    """No request will ever be answered again: each that waits and each that comes gets it, however often it asks."""


class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


class KvCacheRetentionConfig:
    """As the bindings have it: durations are timedeltas, ranges its own class."""

    @dataclass
    class TokenRangeRetentionConfig:
        token_start: int
        token_end: int | None
        priority: int
        duration_ms: timedelta | None = None

        def __post_init__(self) -> None:
            assert 0 <= self.priority <= 100
            assert self.duration_ms is None or isinstance(self.duration_ms, timedelta)

    def __init__(
        self,
        token_range_retention_configs: list[TokenRangeRetentionConfig],
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | None = None,
    ) -> None:
        assert all(isinstance(one, self.TokenRangeRetentionConfig) for one in token_range_retention_configs)
        assert decode_duration_ms is None or isinstance(decode_duration_ms, timedelta)
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms


@dataclass(slots=True, kw_only=True)
class ConversationParams:
    conversation_id: str | None = None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if not os.path.exists(self.lora_path):
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def check(self) -> None:
        guides = [self.json, self.regex, self.grammar, self.json_object or None, self.structural_tag]
        if sum(guide is not None for guide in guides) > 1:
            raise ValueError("Only one guide can be used for a request")


def _make_sampling_params() -> type[Any]:
    table = _contract.contract()["sampling_params"]
    fields = [
        (name, Any, dataclasses.field(default=_contract.default_of(entry))) for name, entry in table["fields"].items()
    ]
    if _contract.FROM_1_3:
        fields += [(name, Any, dataclasses.field(default=None)) for name in table["added_1_3_unverified"]]
    body = {"__post_init__": _check_sampling, "__module__": "tensorrt_llm.sampling_params"}
    return dataclasses.make_dataclass("SamplingParams", fields, kw_only=True, namespace=body)


def _check_sampling(self: Any) -> None:
    self.best_of = self.best_of or self.n
    if self.best_of < self.n:
        raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
    if self.top_k is not None and self.top_k < 0:
        raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
    if self.top_p is not None and not 0 <= self.top_p <= 1:
        raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
    if self.temperature is not None and self.temperature < 0:
        raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
    if self.best_of > 1 and is_greedy(self) and not os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING"):
        raise ValueError(f"Greedy decoding in the LLM API does not allow multiple returns: n={self.n}")
    if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
        raise ValueError("truncate_prompt_tokens must be >= 1")
    if self.logprobs is True:
        self.logprobs = 1
    if self.guided_decoding is not None:
        self.guided_decoding.check()


def is_greedy(params: Any) -> bool:
    """Temperature alone makes nothing random: the contract's rule."""
    return not params.use_beam_search and params.top_k in (None, 1) and params.top_p in (None, 0.0)


SamplingParams = _make_sampling_params()


def _make_disaggregated_params() -> type[Any]:
    fields = [(name, Any, dataclasses.field(default=None)) for name in _contract.disaggregated_fields()]
    body = {"__post_init__": _check_disaggregated, "__module__": "tensorrt_llm.disaggregated_params"}
    return dataclasses.make_dataclass("DisaggregatedParams", fields, kw_only=True, namespace=body)


def _check_disaggregated(self: Any) -> None:
    if self.request_type is None:
        return
    self.request_type = self.request_type.lower()
    if self.request_type not in _contract.contract()["disaggregated_params"]["request_types"]:
        raise ValueError(f"Unknown request type: {self.request_type}")


DisaggregatedParams = _make_disaggregated_params()


class LogitsProcessor:
    """Base class of logits processors; any callable of the same form does."""


class BatchedLogitsProcessor:
    """Belongs to the TensorRT backend."""
