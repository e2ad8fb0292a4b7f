"""What weights take that stay as their files have them, by the rules of `forward/weight_form.py`, without torch.

tests/launch/footprint/test_kept_bytes.py compares it with what engines hold, form by form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bireme.engines.torch.geometry import NEWEST, Capability, why_no_bfloat16, why_no_fp8
from bireme.engines.torch.weights.kept_types import EMBEDDINGS, HEAD, LAYER, are_kept, names_of
from bireme.gguf.architectures import Weight, config_of, weights_of
from bireme.gguf.head import GgufHead
from bireme.launch.footprint.config_fields import ConfigFields

_Told = Mapping[str, Any]
_BLOCK = [128, 128]
_WITH_INDEX = ("group", "dynamic", True)  # compressed-tensors' actorder whose files have an order of inputs
_FP8 = 1.0  # bytes; on a GPU alone
_CPU_GROUP = 32  # of integers: groups are multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    products: int = 0  # weights of the layers' matrices that stay
    product_bytes: int = 0
    head_bytes: int | None = None  # None: it is plain
    embedding_bytes: int | None = None


def kept_blocks(head: GgufHead) -> KeptBytes:
    """Return what stays of a GGUF file on a CPU. Raises ConfigError."""
    config = config_of(head)
    weights = weights_of(head, config)
    matrices = [names_of(layer, own) for layer in range(config["num_hidden_layers"]) for own in LAYER]
    kept = [weights[name].parts[0] for names in matrices if are_kept(weights, names) for name in names]
    embeddings, own_head = _bytes_of(weights, EMBEDDINGS), _bytes_of(weights, HEAD)
    if HEAD not in weights:  # the head's blocks are the embeddings', too
        embeddings, own_head = 0 if embeddings else None, embeddings
    products, num_bytes = sum(math.prod(info.shape) for info in kept), sum(info.num_bytes for info in kept)
    return KeptBytes(products=products, product_bytes=num_bytes, head_bytes=own_head, embedding_bytes=embeddings)


def _bytes_of(weights: Mapping[str, Weight], name: str) -> int | None:
    return weights[name].parts[0].num_bytes if are_kept(weights, [name]) else None


def kept_item_bytes(
    told: ConfigFields | None, is_gpu: bool, dtype: str, capability: Capability = NEWEST
) -> float | None:
    """Return the bytes of a projection's weight, with its share of scales; None: it is dequantized.

    `told`: config.json's quantization_config. `dtype`: that is computed in. `capability`: the GPU's.
    """
    if told is None:
        return None
    read = _METHODS.get(str(told.tree.get("quant_method")))
    found = None if read is None else read(told.tree, is_gpu)
    if found == _FP8:
        return None if dtype == "float32" or why_no_fp8(capability) else found
    return None if is_gpu and why_no_bfloat16(capability) else found


def _awq(told: _Told, is_gpu: bool) -> float | None:
    return _int4_bytes(told.get("q_group_size", told.get("group_size")), is_gpu)


def _gptq(told: _Told, is_gpu: bool) -> float | None:
    return _int4_bytes(told.get("group_size"), is_gpu) if told.get("bits") == 4 and not told.get("desc_act") else None


def _fp8(told: _Told, is_gpu: bool) -> float | None:
    return _FP8 if is_gpu and told.get("weight_block_size") in (None, _BLOCK) else None


def _fbgemm(told: _Told, is_gpu: bool) -> float | None:
    return _FP8 if is_gpu else None


def _modelopt(told: _Told, is_gpu: bool) -> float | None:
    return _FP8 if is_gpu and told.get("quant_algo") == "FP8" else None


def _compressed(told: _Told, is_gpu: bool) -> float | None:
    weights = _weights_of_groups(told)
    strategy, bits = weights.get("strategy"), weights.get("num_bits", 8)
    if weights.get("type") == "float":
        is_kept = strategy in ("tensor", "channel") or weights.get("block_structure") == _BLOCK
        return _FP8 if is_gpu and is_kept else None
    if bits != 4 or weights.get("actorder") in _WITH_INDEX:
        return None
    return _int4_bytes({"group": weights.get("group_size"), "channel": -1}.get(str(strategy)), is_gpu)


def _weights_of_groups(told: _Told) -> _Told:
    """Return what all groups say of their weights; nothing where they differ."""
    groups = told.get("config_groups")
    found = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    first = found[0] if found else None
    return first if isinstance(first, dict) and all(one == first for one in found) else {}


_METHODS = {  # by quantization_config.quant_method
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
}


def _int4_bytes(group: object, is_gpu: bool) -> float | None:
    """`group`: inputs that share a scale and a zero point; -1: all of a row."""
    if group == -1:
        return 0.5
    if not isinstance(group, int) or group < 1 or (not is_gpu and group % _CPU_GROUP):
        return None
    return 0.5 + (3 if is_gpu else 4) / group
