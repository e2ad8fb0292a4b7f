"""Scales of a KV cache in 8-bit floats: one for a layer's keys, one for its values, as checkpoints have them.

A scale is the largest value that calibration has seen, divided by 448: what is stored times the scale is the value.
Sources of the names: compressed-tensors (`kv_cache_scheme`), NVIDIA ModelOpt's export, and what vLLM still reads of
AutoFP8 (`kv_scale`, of both).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from bireme.conversion import convert
from bireme.engines.torch.geometry import UNSCALED, KvScales
from bireme.engines.torch.weights.checkpoint import Checkpoint
from bireme.engines.torch.weights.quantized.heads import Head, Shards, read_heads, torch_dtype
from bireme.engines.torch.weights.quantized.stored import TOLD
from bireme.errors import ConfigError

logger = logging.getLogger("bireme.engines.torch")
_NAMES = {
    "keys": re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:k_scale|k_proj\.k_scale|k_proj\.output_scale|kv_scale)$"),
    "values": re.compile(
        r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:v_scale|v_proj\.v_scale|v_proj\.output_scale|kv_scale)$"
    ),
}
_REMEDY = "set kv_cache_config.dtype: auto"


class _Scheme(msgspec.Struct):
    """compressed-tensors' arguments, of which ModelOpt writes some."""

    num_bits: int = 8
    type: str = "float"
    strategy: str | None = "tensor"
    dynamic: bool | str = False


def read_kv_scales(checkpoint: Checkpoint) -> tuple[KvScales, ...]:
    """Return each layer's, 1.0 where the checkpoint has none at all. Raises ConfigError for what it has wrong."""
    num_layers = int(checkpoint.text_config.num_hidden_layers)
    _check_scheme(checkpoint.told)
    heads = read_heads(checkpoint.shards) if checkpoint.gguf is None else {}
    found = {part: _names_of(pattern, heads) for part, pattern in _NAMES.items()}
    if not any(found.values()):
        logger.warning(
            "kv_scales source=none keys=1.0 values=1.0 reason=the checkpoint has none: larger than 448 is cut"
        )
        return (UNSCALED,) * num_layers
    keys, values = (_read(part, names, heads, num_layers) for part, names in found.items())
    told = num_layers, min(keys), max(keys), min(values), max(values)
    logger.info("kv_scales source=checkpoint layers=%d keys=%.3g..%.3g values=%.3g..%.3g", *told)
    return tuple(KvScales(*pair) for pair in zip(keys, values, strict=True))


def _read(part: str, names: Mapping[int, str], heads: Mapping[str, Head], num_layers: int) -> list[float]:
    """Return each layer's."""
    if missing := sorted(set(range(num_layers)) - names.keys()):
        raise ConfigError(
            f"the checkpoint has scales of KV, and none of the {part} of layer {missing[0]}; fetch it again, or"
            f" {_REMEDY}"
        )
    shards = Shards({name: heads[name] for name in names.values()})
    return [_value(names[layer], heads[names[layer]], shards) for layer in range(num_layers)]


def _check_scheme(told: Mapping[str, Any] | None) -> None:
    told = told or {}
    if (algo := told.get("kv_cache_quant_algo")) not in (None, "FP8"):
        raise ConfigError(f"kv_cache_quant_algo: {algo!r}; scales of FP8 are read: {_REMEDY}")
    if (scheme := told.get("kv_cache_scheme")) is None:
        return
    own = convert(scheme, _Scheme, f"{TOLD}.kv_cache_scheme")
    if (own.num_bits, own.type, own.strategy or "tensor", own.dynamic) != (8, "float", "tensor", False):
        raise ConfigError(
            f"{TOLD}.kv_cache_scheme: {own.type} of {own.num_bits} bits, strategy {own.strategy}, dynamic"
            f" {own.dynamic}; 8-bit floats with one scale a layer are read: {_REMEDY}"
        )


def _names_of(pattern: re.Pattern[str], heads: Mapping[str, Head]) -> dict[int, str]:
    """Return the name of each layer's scale."""
    found: dict[int, str] = {}
    for name in heads:
        if match := pattern.search(name):
            layer = int(match[1])
            if layer in found:
                raise ConfigError(f"{name} and {found[layer]} are both scales of layer {layer}; {_REMEDY}")
            found[layer] = name
    return found


def _value(name: str, head: Head, shards: Shards) -> float:
    if torch_dtype(head.dtype) is None or math.prod(head.shape) != 1:
        raise ConfigError(f"{name} is {head.dtype} {list(head.shape)}; one number is read: {_REMEDY}")
    value = float(shards.read(name).float())
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value}; a positive number is expected: {_REMEDY}")
    return value
