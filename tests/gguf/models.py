"""Tiny random models as GGUF files, as llama.cpp's converter would write them: its names, order of rows and norms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.engines.torch import tiny_models
from tests.gguf.files import write

# Of a type whose blocks have 256 values rows are that long.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {  # general.architecture -> transformers' type, its settings
    "llama": ("llama", {}),
    "llama with experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", tiny_models.MOE | {"norm_topk_prob": True}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {"sliding_window": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 4},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
    "phi3": ("phi3", {}),
}  # fmt: skip
_STEMS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def build(architecture: str, **changes: Any) -> Any:
    model_type, settings = SETTINGS[architecture]
    model = tiny_models.build(model_type, **(settings | changes))
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += torch.randn_like(parameter) * 0.1
    return model


def metadata_of(architecture: str, model: Any) -> dict[str, Any]:
    config, arch = model.config, architecture.split()[0]
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        "rope.freq_base": float(rope["rope_theta"]),
        "expert_count": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "attention.sliding_window": config.sliding_window if arch in ("gemma2", "gemma3") else None,
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None) if arch == "gemma2" else None,
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None) if arch == "gemma2" else None,
    }
    return {"general.architecture": arch} | {
        f"{arch}.{key}": value for key, value in found.items() if value is not None
    }


def tensors_of(architecture: str, model: Any) -> dict[str, np.ndarray]:
    arch, config = architecture.split()[0], model.config
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.state_dict().items():
        values = parameter.detach().float()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        if name.endswith("experts.gate_up_proj"):
            gate, up = values.chunk(2, 1)
            layer = name.split(".")[2]
            tensors |= {
                f"blk.{layer}.ffn_gate_exps.weight": gate.numpy(),
                f"blk.{layer}.ffn_up_exps.weight": up.numpy(),
            }
            continue
        tensors[_gguf_name(arch, name)] = values.numpy()
    return tensors


def _gguf_name(arch: str, name: str) -> str:
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if name.endswith("experts.down_proj"):
        return f"blk.{name.split('.')[2]}.ffn_down_exps.weight"
    stem, suffix = name.rsplit(".", 1)
    if stem in outside:
        return f"{outside[stem]}.{suffix}"
    _, _, layer, inside = stem.split(".", 3)
    two_norms = arch in ("gemma2", "gemma3")
    norms = {"post_attention_layernorm": "post_attention_norm" if two_norms else "ffn_norm"}
    return f"blk.{layer}.{(_STEMS | norms)[inside]}.{suffix}"


def byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level vocabulary of `vocab_size`: three control tokens, bytes, a few merges."""
    from bireme.text.vocabulary import byte_characters

    tokens = ["<pad>", "<s>", "</s>", *byte_characters()]
    merges = [(left, right) for left in "abcdehilnort" for right in "aeionrst"]
    merges = merges[: vocab_size - len(tokens)]
    tokens += [left + right for left, right in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}",
    }


def save(
    folder: Path,
    architecture: str,
    block_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    name: str = "tiny.gguf",
    **changes: Any,
) -> Path:
    """Write a random model as a GGUF file."""
    model = build(architecture, **changes)
    metadata = metadata_of(architecture, model) | byte_tokenizer(model.config.vocab_size)
    return write(folder / name, metadata, tensors_of(architecture, model), block_type)
