"""Checkpoints of compressed-tensors, the library of llm-compressor: one scheme for all weights, by its format.

Source: compressed-tensors' QuantizationArgs and compressors. Its names are `weight_scale` and, packed, `weight_packed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from bireme.conversion import convert
from bireme.engines.torch.storage import BLOCK, StoredAs
from bireme.engines.torch.weights.quantized.fp8 import read_fp8
from bireme.engines.torch.weights.quantized.heads import Head
from bireme.engines.torch.weights.quantized.integers import CompressedIntegers, read_compressed_integers
from bireme.engines.torch.weights.quantized.stored import TOLD, StoredTensor
from bireme.errors import ConfigError

_FORMATS = {  # of each type of values; the first libraries called both unpacked ones naive
    "float": ("float-quantized", "naive-quantized"),
    "int": ("pack-quantized", "int-quantized", "naive-quantized"),
}


class _WeightArgs(msgspec.Struct, frozen=True):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None


class _ConfigGroup(msgspec.Struct, frozen=True):
    weights: _WeightArgs | None = None
    format: str | None = None


class _CompressedConfig(msgspec.Struct):
    config_groups: dict[str, _ConfigGroup] = {}
    format: str = "dense"
    kv_cache_scheme: Any = None
    quantization_status: str = "compressed"
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def read_compressed_tensors(told: dict[str, Any], heads: Mapping[str, Head]) -> list[StoredTensor]:
    """Raises ConfigError for schemes that are not read, and for files that are not what the scheme says."""
    weights, form = _scheme_of(told)
    return _read_floats(weights, heads) if weights.type == "float" else _read_integers(weights, form, heads)


def named_by_scheme(told: dict[str, Any]) -> StoredAs | None:
    """Return how its weights can stay as they are; None: they can't. Raises ConfigError as for a checkpoint."""
    weights, form = _scheme_of(told)
    if weights.type == "float":
        block = "block" if weights.block_structure == (BLOCK, BLOCK) else None
        strategy = block if weights.strategy == "block" else weights.strategy
        algos = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_BLOCK_SCALES"}
        return StoredAs(algos[strategy]) if strategy in algos else None
    group = {"group": weights.group_size, "channel": 0}.get(str(weights.strategy))
    is_kept = weights.num_bits == 4 and form == "pack-quantized" and group is not None
    return StoredAs("W4A16_GPTQ", group or 0, torch.float16) if is_kept else None


def _scheme_of(told: dict[str, Any]) -> tuple[_WeightArgs, str]:
    """Return the arguments and the format of all weights. Raises ConfigError."""
    scheme = convert(told, _CompressedConfig, TOLD)
    if scheme.quantization_status != "compressed":
        raise ConfigError(
            f"{TOLD}.quantization_status: {scheme.quantization_status!r}; compressed weights are read: save the model"
            " with save_compressed=True"
        )
    if scheme.transform_config or (scheme.sparsity_config or {}).get("format", "dense") != "dense":
        raise ConfigError(f"{TOLD}: sparse and rotated weights (sparsity_config, transform_config) are not read")
    kinds = {(group.weights, group.format or scheme.format) for group in scheme.config_groups.values()}
    if not kinds:
        raise ConfigError(
            f"{TOLD}.config_groups: none; groups say how weights are stored, or kv_cache_scheme how KV is"
        )
    if len(kinds) != 1:
        raise ConfigError(
            f"{TOLD}.config_groups: {', '.join(scheme.config_groups)} store weights in {len(kinds)} ways; checkpoints"
            " that mix methods are not read: use one of a single method"
        )
    weights, form = kinds.pop()
    if weights is None or form not in _FORMATS.get(weights.type, ()):
        raise ConfigError(f"{TOLD}.format: {form!r} is not read; the torch engine reads {_known()}")
    return weights, form


def _known() -> str:
    return ", ".join(dict.fromkeys(form for forms in _FORMATS.values() for form in forms))


def _read_integers(weights: _WeightArgs, form: str, heads: Mapping[str, Head]) -> list[StoredTensor]:
    is_packed = form == "pack-quantized"
    sizes = {"group": weights.group_size, "channel": -1, "tensor": "tensor"}
    size = sizes.get(str(weights.strategy))
    if weights.num_bits not in ((4, 8) if is_packed else (8,)) or size is None:
        raise ConfigError(
            f"{TOLD}: {form} integers of {weights.num_bits} bits, strategy {weights.strategy}, group_size"
            f" {weights.group_size}; 8 bits, or 4 packed, by group with its size, channel or tensor are read"
        )
    kept = CompressedIntegers(weights.num_bits, is_packed)
    return read_compressed_integers(heads, kept, size, has_zeros=not weights.symmetric)


def _read_floats(weights: _WeightArgs, heads: Mapping[str, Head]) -> list[StoredTensor]:
    blocks = {"tensor": "tensor", "channel": "channel", "block": weights.block_structure}
    block = blocks.get(str(weights.strategy))
    if weights.num_bits != 8 or block is None or min(weights.block_structure or (1,)) < 1:
        raise ConfigError(
            f"{TOLD}: float weights of {weights.num_bits} bits, strategy {weights.strategy}, block_structure"
            f" {weights.block_structure}; FP8 by tensor, channel, or block with its two sizes is read"
        )
    return read_fp8(heads, block, "weight_scale")
