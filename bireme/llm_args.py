"""TensorRT-LLM's engine YAML: kept whole for the engine, and cut down to the settings that bireme itself reads.

Its one rule: nothing is checked here. What TensorRT-LLM would refuse is told by bireme/engines/trtllm/config.py,
which knows the contract; this layer only says where each key goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# TensorRT-LLM's defaults where ours differ: what is read of a silent YAML must be what the engine does.
DEFAULTS: dict[str, Any] = {"guided_decoding_backend": None, "enable_chunked_prefill": False}


def split(tree: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine_config block: the keys of `known` that the YAML sets, and the whole YAML as `llm_args`.

    `known` maps each key that bireme reads to None, a block's key to such a mapping. A null is left out: it
    stands for TensorRT-LLM's default.
    """
    return DEFAULTS | _cut(tree, known) | {"llm_args": dict(tree)}


def _cut(tree: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for key, inner in known.items():
        value = tree.get(key)
        if value is None:
            continue
        result[key] = _cut(value, inner) if inner is not None and isinstance(value, Mapping) else value
    return result
