"""The names of tensorrt_llm that this engine uses, and what the installed release knows of them.

Every difference between releases is found here: by signatures and fields, and by the version where neither tells.
tensorrt_llm is imported only in `load`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines.trtllm")

BACKENDS = {"pytorch": "tensorrt_llm", "_autodeploy": "tensorrt_llm._torch.auto_deploy"}
# Python's level names to those that TensorRT-LLM reads from TLLM_LOG_LEVEL when it is imported.
LOG_LEVELS = {
    "DEBUG": "DEBUG",
    "INFO": "INFO",
    "WARNING": "WARNING",
    "WARN": "WARNING",
    "ERROR": "ERROR",
    "CRITICAL": "INTERNAL_ERROR",
    "FATAL": "INTERNAL_ERROR",
}
# What SamplingParams of every release have and the default sampler, TorchSampler, ignores in older ones. 1.3 learned it
# in several steps (PRs 16052, 16485, 17172); its first release that was read with all of it:
_UNHEEDED = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty", "bad_token_ids", "seed"})
HEEDED_SINCE = "1.3.0rc29"
OTHER_SAMPLER_UNTIL = "1.3.0rc26"  # sampler_type TRTLLMSampler, which supports all of it
# Before it KV events name neither the salt nor the adapter that a block belongs to.
_OWNERS_SINCE = "1.3.0rc29"
_OVERLAPPED_PREFILL_SINCE = "1.3"


@dataclass(frozen=True, slots=True)
class Api:
    """One installed release, for one backend."""

    version: str
    llm: Any
    sampling_params: Any
    guided_decoding_params: Any
    disaggregated_params: Any
    scheduling_params: Any
    lora_request: Any
    retention_config: Any  # KvCacheRetentionConfig
    logprob: Any
    request_error: type[Exception]
    generate_parameters: frozenset[str]  # of LLM.generate_async
    sampling_fields: frozenset[str]
    disaggregated_fields: frozenset[str]

    @property
    def unheeded(self) -> frozenset[str]:
        """The fields of SamplingParams that the default sampler accepts and ignores."""
        return frozenset() if is_since(self.version, HEEDED_SINCE) else _UNHEEDED

    @property
    def has_other_sampler(self) -> bool:
        return not is_since(self.version, OTHER_SAMPLER_UNTIL)

    @property
    def events_name_owners(self) -> bool:
        return is_since(self.version, _OWNERS_SINCE)

    @property
    def overlaps_prefill(self) -> bool:
        """Whether context_only requests are served beside it; else they end the worker."""
        return is_since(self.version, _OVERLAPPED_PREFILL_SINCE)


def is_since(version: str, other: str) -> bool:
    """Candidates come before their release."""
    return _order(version) >= _order(other)


def _order(version: str) -> tuple[float, ...]:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?rc(\d+))?", version)
    if not match:
        return (math.inf,)  # a build without a number is a development version
    major, minor, patch, candidate = match.groups()
    is_bare = patch is None and candidate is None  # 1.3: all of 1.3, its candidates included
    last = float(candidate) if candidate else 0.0 if is_bare else math.inf
    return float(major), float(minor), float(patch or 0), last


def load(backend: str) -> Api:
    """Raises ConfigError when it, or something needed in it, is missing."""
    set_log_level(os.environ)
    try:
        version = importlib.import_module("tensorrt_llm").__version__
        llm = importlib.import_module(BACKENDS[backend]).LLM
        sampling = importlib.import_module("tensorrt_llm.sampling_params")
        disaggregated = importlib.import_module("tensorrt_llm.disaggregated_params").DisaggregatedParams
        request = importlib.import_module("tensorrt_llm.executor.request")
        return Api(
            version=version,
            llm=llm,
            sampling_params=sampling.SamplingParams,
            guided_decoding_params=sampling.GuidedDecodingParams,
            disaggregated_params=disaggregated,
            scheduling_params=importlib.import_module("tensorrt_llm.scheduling_params").SchedulingParams,
            lora_request=request.LoRARequest,
            retention_config=importlib.import_module("tensorrt_llm.llmapi").KvCacheRetentionConfig,
            logprob=importlib.import_module("tensorrt_llm.executor.result").Logprob,
            request_error=importlib.import_module("tensorrt_llm.executor.utils").RequestError,
            generate_parameters=frozenset(inspect.signature(llm.generate_async).parameters),
            sampling_fields=field_names(sampling.SamplingParams),
            disaggregated_fields=field_names(disaggregated),
        )
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"engine: trtllm needs tensorrt_llm 1.2.1 or later in the engine's python ({error}); use the image of"
            " docker/Dockerfile.trtllm, or name an environment that has it in BIREME_ENGINE_PYTHON"
        ) from error


def field_names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


def set_log_level(environment: Any) -> None:
    """Give TensorRT-LLM bireme's own level, unless TLLM_LOG_LEVEL is set."""
    level = environment.get("BIREME_LOG_LEVEL", "INFO").upper()
    environment.setdefault("TLLM_LOG_LEVEL", LOG_LEVELS.get(level, "INFO"))
