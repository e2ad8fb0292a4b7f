"""The names of tensorrt_llm that this engine uses, and what the installed release knows of them.

Its one rule: every difference between releases is found here, by looking at signatures and fields, and
nowhere else by comparing versions. tensorrt_llm is imported in `load` and not before.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
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
    logprob: Any
    request_error: type[Exception]
    generate_parameters: frozenset[str]  # of LLM.generate_async
    sampling_fields: frozenset[str]
    disaggregated_fields: frozenset[str]


def load(backend: str) -> Api:
    """Import tensorrt_llm. Raises ConfigError when it is not there or lacks what is needed."""
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
    """Return a dataclass's fields."""
    return frozenset(field.name for field in dataclasses.fields(kind))


def set_log_level(environment: Any) -> None:
    """Give TensorRT-LLM bireme's own level, unless TLLM_LOG_LEVEL says another."""
    level = environment.get("BIREME_LOG_LEVEL", "INFO").upper()
    environment.setdefault("TLLM_LOG_LEVEL", LOG_LEVELS.get(level, "INFO"))
