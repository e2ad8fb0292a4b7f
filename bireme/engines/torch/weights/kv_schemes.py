"""Which quantization_config says what KV is kept in, and nothing of the weights. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_of_kv_alone(told: Mapping[str, Any]) -> bool:
    """`told`: a quantization_config, of compressed-tensors or NVIDIA ModelOpt; the weights of such one are plain."""
    if told.get("quant_method") == "modelopt":
        return told.get("quant_algo") is None and told.get("kv_cache_quant_algo") is not None
    groups = told.get("config_groups") or {}
    if told.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping):
        return False
    stores = any(not isinstance(group, Mapping) or group.get("weights") is not None for group in groups.values())
    return told.get("kv_cache_scheme") is not None and not stores
