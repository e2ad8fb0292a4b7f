"""Says what an installed tensorrt_llm looks like, as one JSON document on stdout.

    python tests/contract/describe_api.py

Run the real one in a process of its own. The package is whichever is on the path, the real one or the stand-in.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from typing import Any

# What bireme calls or reads; anything else may change.
USED = {
    "tensorrt_llm": ["LLM", "MultimodalEncoder"],
    "tensorrt_llm._torch.auto_deploy": ["LLM"],
    "tensorrt_llm.sampling_params": ["SamplingParams", "GuidedDecodingParams"],
    "tensorrt_llm.disaggregated_params": ["DisaggregatedParams"],
    "tensorrt_llm.scheduling_params": ["SchedulingParams"],
    "tensorrt_llm.executor.request": ["LoRARequest"],
    "tensorrt_llm.executor.result": ["CompletionOutput", "Logprob"],
    "tensorrt_llm.executor.utils": ["RequestError"],
    "tensorrt_llm.metrics": ["MetricsCollector"],
}


def describe() -> dict[str, Any]:
    package = importlib.import_module("tensorrt_llm")
    found = {module: [name for name in names if _find(module, name) is not None] for module, names in USED.items()}
    llm = _find("tensorrt_llm", "LLM")
    return {
        "version": package.__version__,
        "names": found,
        "constructor": _parameters(llm.__init__),
        "generate_async": _parameters(llm.generate_async),
        "methods": [name for name in dir(llm) if not name.startswith("__")],
        "sampling_params": _fields(_find("tensorrt_llm.sampling_params", "SamplingParams")),
        "guided_decoding_params": _fields(_find("tensorrt_llm.sampling_params", "GuidedDecodingParams")),
        "disaggregated_params": _fields(_find("tensorrt_llm.disaggregated_params", "DisaggregatedParams")),
        "scheduling_params": _fields(_find("tensorrt_llm.scheduling_params", "SchedulingParams")),
        "completion_output": _fields(_find("tensorrt_llm.executor.result", "CompletionOutput")),
        "llm_args": sorted(getattr(_find("tensorrt_llm.llmapi.llm_args", "TorchLlmArgs"), "model_fields", {})),
        "kv_cache_config": sorted(getattr(_find("tensorrt_llm.llmapi", "KvCacheConfig"), "model_fields", {})),
        "request_error_base": _find("tensorrt_llm.executor.utils", "RequestError").__mro__[1].__name__,
        "collector": [name for name in dir(_find("tensorrt_llm.metrics", "MetricsCollector")) if name[0] != "_"],
    }


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _parameters(function: Any) -> dict[str, str]:
    """Return name -> repr of the default; "required" where there is none."""
    empty = inspect.Parameter.empty
    return {
        name: "required" if parameter.default is empty else repr(parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _fields(kind: Any) -> dict[str, str]:
    return {
        field.name: "factory" if field.default is dataclasses.MISSING else repr(field.default)
        for field in dataclasses.fields(kind)
        if not field.name.startswith("_")
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
