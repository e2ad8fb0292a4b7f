"""What a GGUF file's architecture is in transformers: config.json, and which tensors a weight is made of.

Names of keys and tensors are llama.cpp's (gguf-py/gguf/constants.py and tensor_mapping.py), what its converter changes
on the way is undone here (convert_hf_to_gguf.py): rows of rotary projections, Gemma's norms, fused experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bireme.errors import ConfigError
from bireme.gguf.head import GgufHead, TensorInfo

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_MAX_LAYERS = 1 << 10
_MAX_CONTEXT = 1 << 24
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ONE_NORM = {"ffn_norm": "post_attention_layernorm"}
_TWO_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"}
_EXPERT_PARTS = {  # without a suffix in the model
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
}
_DENSE = _ATTENTION | _FEED_FORWARD | _ONE_NORM
_READ_INTO_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Llama 3.1's rotary scaling (transformers' rope type llama3): the file has only the frequencies' divisors.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of the model, and what it is made of."""

    parts: tuple[TensorInfo, ...]  # several: joined along the rows of each expert, (experts, rows, columns)
    num_heads: int = 0  # of a rotary projection whose rows lie in pairs: (heads, half, 2); 0: as in the model
    offset: float = 0.0  # what is added

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        if len(self.parts) == 1:
            return first
        return (*first[:-2], sum(part.shape[-2] for part in self.parts), first[-1])


@dataclass(frozen=True, slots=True)
class _Architecture:
    model_type: str
    class_name: str
    names: Mapping[str, str]  # of a layer's tensors, without their suffix
    more: Callable[[GgufHead, dict[str, Any]], dict[str, Any]] = lambda head, config: {}
    has_experts: bool = False
    has_pairs: bool = False  # rows of rotary projections lie in pairs
    norm_offset: float = 0.0


def config_of(head: GgufHead) -> dict[str, Any]:
    """Return config.json of a file's model. Raises ConfigError for what can't be served, by name."""
    found, prefix = _architecture(head), head.architecture
    config = {"model_type": found.model_type, "architectures": [found.class_name]} | _sizes(head, prefix)
    config |= {"rope_parameters": _rope(head, prefix, config), "dtype": _dtype(head)}
    config |= _token_ids(head, config["vocab_size"])
    return config | found.more(head, config)


def weights_of(head: GgufHead, config: Mapping[str, Any]) -> dict[str, Weight]:
    """Return what each parameter of the model is made of, by its name in transformers. Raises ConfigError."""
    found = _architecture(head)
    weights = _expert_weights(head, config["num_hidden_layers"]) if found.has_experts else {}
    taken = {part.name for weight in weights.values() for part in weight.parts}.union(_READ_INTO_CONFIG)
    heads = (
        {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if found.has_pairs else {}
    )
    for name in sorted(head.tensors.keys() - taken):
        own, stem = _renamed(head, name, found)
        offset = found.norm_offset if own.endswith("norm.weight") else 0.0
        weights[own] = Weight((head.tensors[name],), heads.get(stem, 0), offset)
    return weights


def _renamed(head: GgufHead, name: str, found: _Architecture) -> tuple[str, str]:
    """Return a tensor's name in transformers, and its stem in the file: attn_q of blk.3.attn_q.weight."""
    layer, inside = _split(name)
    stem, _, suffix = inside.rpartition(".")
    known = _OUTSIDE.get(stem) if layer is None else found.names.get(stem)
    if known is None or suffix not in ("weight", "bias"):
        raise ConfigError(f"{head.name}: tensor {name[:80]!r} is no part of {found.class_name}; take another file")
    return (known if layer is None else f"model.layers.{layer}.{known}") + f".{suffix}", stem


def _expert_weights(head: GgufHead, num_layers: int) -> dict[str, Weight]:
    weights = {}
    for layer in range(num_layers):
        for own, parts in _EXPERT_PARTS.items():
            names = [f"blk.{layer}.{part}" for part in parts]
            if missing := [name for name in names if name not in head.tensors]:
                raise ConfigError(
                    f"{head.name}: tensor {missing[0]} is missing; a file with each expert as a tensor is an old"
                    " converter's: convert the model again"
                )
            weights[f"model.layers.{layer}.{own}"] = Weight(tuple(head.tensors[name] for name in names))
    return weights


def _split(name: str) -> tuple[int | None, str]:
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def _architecture(head: GgufHead) -> _Architecture:
    name = head.architecture
    if name == "llama" and "llama.expert_count" in head.metadata and head.integer("llama.expert_count"):
        name = "llama with experts"
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ConfigError(
            f"{head.name}: general.architecture: {name[:40]!r} is not served as GGUF (served are {known})"
        )
    return _ARCHITECTURES[name]


def _sizes(head: GgufHead, prefix: str) -> dict[str, Any]:
    """Return the model's sizes; each that decides how much is made is compared with the tensors that are there."""
    hidden = head.integer(f"{prefix}.embedding_length", lowest=1)
    num_layers = head.integer(f"{prefix}.block_count", lowest=1, highest=_MAX_LAYERS)
    layers = {layer for layer, _ in map(_split, head.tensors) if layer is not None}
    if layers != set(range(num_layers)):
        raise head.wrong(f"{prefix}.block_count", f"there are tensors of {len(layers)} layers, {num_layers} expected")
    embedding = _matrix(head, "token_embd.weight", None, hidden)
    num_heads = _same_in_each_layer(head, f"{prefix}.attention.head_count", None)
    num_kv_heads = _same_in_each_layer(head, f"{prefix}.attention.head_count_kv", num_heads)
    if not num_kv_heads or num_heads % num_kv_heads:
        raise head.wrong(f"{prefix}.attention.head_count_kv", f"{num_heads} query heads are no multiple of it")
    head_dim = head.integer(f"{prefix}.attention.key_length", hidden // num_heads, lowest=1)
    if head.integer(f"{prefix}.attention.value_length", head_dim) != head_dim:
        raise head.wrong(f"{prefix}.attention.value_length", f"keys have {head_dim}; both have to be the same")
    if "blk.0.attn_q.weight" in head.tensors:
        _matrix(head, "blk.0.attn_q.weight", num_heads * head_dim, hidden)
        _matrix(head, "blk.0.attn_k.weight", num_kv_heads * head_dim, hidden)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _same_in_each_layer(head, f"{prefix}.feed_forward_length", 0),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": head.integer(f"{prefix}.context_length", lowest=1, highest=_MAX_CONTEXT),
        "rms_norm_eps": head.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in head.tensors,
    }


def _matrix(head: GgufHead, name: str, num_rows: int | None, num_columns: int) -> TensorInfo:
    info = head.tensors.get(name)
    if info is None:
        raise ConfigError(f"{head.name}: tensor {name} is missing; fetch the file again, or all of its parts")
    if len(info.shape) != 2 or info.shape[1] != num_columns or num_rows not in (None, info.shape[0]):
        wanted = [num_rows or "any", num_columns]
        raise ConfigError(f"{head.name}: {name} has shape {list(info.shape)}, its metadata say {wanted}")
    return info


def _same_in_each_layer(head: GgufHead, key: str, default: int | None) -> int:
    """Return a number that a file may have once for each layer, which has to be the same in each."""
    value = head.metadata.get(key)
    if isinstance(value, np.ndarray) and len(value) and value.dtype.kind in "iu" and (value == value[0]).all():
        return int(value[0])
    return head.integer(key, default, lowest=0 if default == 0 else 1, highest=1 << 24)


def _rope(head: GgufHead, prefix: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' rope_parameters."""
    theta = head.number(f"{prefix}.rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if theta <= 0:
        raise head.wrong(f"{prefix}.rope.freq_base", "a number above 0 is expected")
    width = head.integer(f"{prefix}.rope.dimension_count", config["head_dim"], lowest=1)
    if width != config["head_dim"]:
        if prefix != "phi3" or width > config["head_dim"]:
            raise head.wrong(f"{prefix}.rope.dimension_count", f"heads have {config['head_dim']}")
        rope["partial_rotary_factor"] = width / config["head_dim"]
    return rope | _scaling(head, prefix, width, theta)


def _scaling(head: GgufHead, prefix: str, width: int, theta: float) -> dict[str, Any]:
    key = f"{prefix}.rope.scaling.type"
    kind = head.text(key, "none")
    if kind == "longrope" or "rope_factors_long.weight" in head.tensors:
        factors = {
            f"{length}_factor": _values(head, f"rope_factors_{length}.weight", width // 2)
            for length in ("long", "short")
        }
        return {"rope_type": "longrope", "original_max_position_embeddings": _original(head, prefix)} | factors
    if kind in ("linear", "yarn"):
        factor = head.number(f"{prefix}.rope.scaling.factor")
        if not 1 <= factor <= 1 << 16:
            raise head.wrong(f"{prefix}.rope.scaling.factor", "1 to 65536 is expected")
        original = {"original_max_position_embeddings": _original(head, prefix)} if kind == "yarn" else {}
        return {"rope_type": kind, "factor": factor} | original
    if kind != "none":
        raise head.wrong(key, "none, linear, yarn and longrope are served")
    found = head.tensors.get("rope_freqs.weight")
    return _llama3_scaling(head, found, width, theta) if found else {}


def _original(head: GgufHead, prefix: str) -> int:
    return head.integer(f"{prefix}.rope.scaling.original_context_length", lowest=1, highest=_MAX_CONTEXT)


def _llama3_scaling(head: GgufHead, info: TensorInfo, width: int, theta: float) -> dict[str, Any]:
    """Return the scaling whose divisors a file has. Raises ConfigError where they are of no known one."""
    found = np.array(_values(head, info.name, width // 2))
    scaling = _LLAMA3 | {"rope_type": "llama3", "factor": round(float(found.max()), 3)}
    wavelengths = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    low, high, original = (_LLAMA3[name] for name in _LLAMA3)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(found, 1 / ((1 - smooth) / found.max() + smooth), rtol=1e-3):
        raise ConfigError(
            f"{head.name}: rope_freqs.weight: these are not the divisors of Llama 3.1's scaling, the only one that is"
            " served as a tensor; take the model as safetensors"
        )
    return scaling


def _values(head: GgufHead, name: str, count: int) -> list[float]:
    """Read a small float32 tensor."""
    info = head.tensors.get(name)
    if info is None or info.shape != (count,) or info.type.name != "F32":
        has = "is missing" if info is None else f"is {info.type.name} {list(info.shape)}"
        raise ConfigError(f"{head.name}: {name} {has}, F32 [{count}] is expected; convert the model again")
    with info.path.open("rb") as file:
        file.seek(info.begin)
        values = np.frombuffer(file.read(info.num_bytes), "<f4")
    if len(values) != count or not np.isfinite(values).all() or (values <= 0).any():
        raise ConfigError(f"{head.name}: {name}: numbers above 0 are expected; fetch the file again")
    return [float(value) for value in values]


def _dtype(head: GgufHead) -> str:
    """Return the dtype that holds what most of the file's values are; blocks become bfloat16."""
    sizes: dict[str, int] = {}
    for info in head.tensors.values():
        if len(info.shape) > 1:
            sizes[info.type.name] = sizes.get(info.type.name, 0) + math.prod(info.shape)
    return {"F32": "float32", "F16": "float16"}.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")


def _token_ids(head: GgufHead, vocab_size: int) -> dict[str, Any]:
    found = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (full := f"tokenizer.ggml.{key}_token_id") in head.metadata:
            found[f"{name}_token_id"] = head.integer(full, highest=vocab_size - 1)
    return {"bos_token_id": None, "eos_token_id": None} | found


def _llama(head: GgufHead, config: dict[str, Any]) -> dict[str, Any]:
    _without_window(head, "llama")
    return {"attention_bias": "blk.0.attn_q.bias" in head.tensors, "mlp_bias": "blk.0.ffn_up.bias" in head.tensors}


def _mixtral(head: GgufHead, config: dict[str, Any]) -> dict[str, Any]:
    num_experts, used = _experts(head, "llama", config["intermediate_size"])
    return {"num_local_experts": num_experts, "num_experts_per_tok": used, "sliding_window": None}


def _qwen(head: GgufHead, config: dict[str, Any]) -> dict[str, Any]:
    _without_window(head, head.architecture)
    return {"use_sliding_window": False}


def _qwen3_moe(head: GgufHead, config: dict[str, Any]) -> dict[str, Any]:
    width = head.integer("qwen3moe.expert_feed_forward_length", lowest=1, highest=1 << 24)
    num_experts, used = _experts(head, "qwen3moe", width)
    of_experts = {"num_experts": num_experts, "num_experts_per_tok": used, "moe_intermediate_size": width}
    # llama.cpp divides by the sum of those that are used, always (src/models/qwen3moe.cpp).
    return _qwen(head, config) | of_experts | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _experts(head: GgufHead, prefix: str, width: int) -> tuple[int, int]:
    num_experts = head.integer(f"{prefix}.expert_count", lowest=1, highest=1 << 12)
    used = head.integer(f"{prefix}.expert_used_count", lowest=1, highest=num_experts)
    info = head.tensors.get("blk.0.ffn_down_exps.weight")
    if info is not None and (len(info.shape) != 3 or (info.shape[0], info.shape[2]) != (num_experts, width)):
        raise head.wrong(f"{prefix}.expert_count", f"blk.0.ffn_down_exps.weight has shape {list(info.shape)}")
    return num_experts, used


def _gemma2(head: GgufHead, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": head.integer("gemma2.attention.sliding_window", 4096, lowest=1),
        "attn_logit_softcapping": head.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": head.number("gemma2.final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, of_all_heads=46),
    }


def _gemma3(head: GgufHead, config: dict[str, Any]) -> dict[str, Any]:
    every = head.integer("gemma3.attention.sliding_window_pattern", 6, lowest=1)
    local = head.number("gemma3.rope.freq_base_swa", 10000.0)
    return {
        "sliding_window": head.integer("gemma3.attention.sliding_window", lowest=1),
        "layer_types": [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": _query_scalar(config, of_all_heads=62),
    }


def _query_scalar(config: Mapping[str, Any], of_all_heads: int) -> int:
    """Return what attention scores are divided by the root of: the largest model of a family, which no key names but
    its number of layers, has the hidden size by heads (llama.cpp's src/models/gemma2.cpp, gemma3.cpp)."""
    if config["num_hidden_layers"] == of_all_heads:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(head: GgufHead, config: dict[str, Any]) -> dict[str, Any]:
    window = head.integer("phi3.attention.sliding_window", 0)
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {"sliding_window": window or None, "original_max_position_embeddings": original} | {
        name: rope[name] for name in ("partial_rotary_factor",) if name in rope
    }


def _without_window(head: GgufHead, prefix: str) -> None:
    if head.integer(f"{prefix}.attention.sliding_window", 0):
        raise head.wrong(f"{prefix}.attention.sliding_window", f"windows of {prefix} are not served as GGUF")


def architectures() -> Iterable[str]:
    """Return the classes that files can be of."""
    return sorted({found.class_name for found in _ARCHITECTURES.values()})


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _DENSE, _llama, has_pairs=True),
    "llama with experts": _Architecture(
        "mixtral", "MixtralForCausalLM", _ATTENTION | _ONE_NORM | _EXPERTS, _mixtral, has_experts=True, has_pairs=True
    ),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _DENSE, _qwen),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _DENSE | _HEAD_NORMS, _qwen),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _ATTENTION | _HEAD_NORMS | _ONE_NORM | _EXPERTS,
        _qwen3_moe,
        has_experts=True,
    ),
    "gemma": _Architecture("gemma", "GemmaForCausalLM", _DENSE, norm_offset=-1.0),
    "gemma2": _Architecture(
        "gemma2", "Gemma2ForCausalLM", _ATTENTION | _FEED_FORWARD | _TWO_NORMS, _gemma2, norm_offset=-1.0
    ),
    "gemma3": _Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION | _HEAD_NORMS | _FEED_FORWARD | _TWO_NORMS,
        _gemma3,
        norm_offset=-1.0,
    ),
    "phi3": _Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
        | _ONE_NORM,
        _phi3,
    ),
}
