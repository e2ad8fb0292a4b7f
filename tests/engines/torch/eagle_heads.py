"""EAGLE-3 heads of random weights in the published layout, what they compute, from its names, all at once, and
attention over the blocks of one sequence, as an engine has it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from bireme.engines.torch.forward.decoder_ops import AttentionLayer, DecoderOps
from bireme.engines.torch.forward.eagle_head import Attend, EagleHead
from bireme.engines.torch.step import ChunkView, DecodeView, GroupStep, TableStep

BASE = SimpleNamespace(hidden_size=32, vocab_size=50, num_hidden_layers=8)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 40,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 50,
    "draft_vocab_size": 20, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "max_position_embeddings": 64,
}  # fmt: skip
MID = "midlayer."


def make_tensors(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc": (32, 96), MID + "self_attn.q_proj": (64, 64), MID + "self_attn.k_proj": (32, 64),
        MID + "self_attn.v_proj": (32, 64), MID + "self_attn.o_proj": (32, 64), MID + "mlp.gate_proj": (40, 32),
        MID + "mlp.up_proj": (40, 32), MID + "mlp.down_proj": (32, 40), "lm_head": (20, 32),
    }  # fmt: skip
    found = {f"{name}.weight": torch.randn(shape, generator=generator) / 5 for name, shape in shapes.items()}
    for name in (MID + "hidden_norm", MID + "input_layernorm", MID + "post_attention_layernorm", "norm"):
        found[f"{name}.weight"] = 1 + torch.randn(32, generator=generator) / 3
    ids = torch.arange(20) * 2 + 7
    found["d2t"] = ids - torch.arange(20)
    found["t2d"] = torch.zeros(50, dtype=torch.bool).index_fill_(0, ids, True)
    return found


def write_head(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(make_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


@torch.inference_mode()
def published(tensors: dict[str, Tensor], embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """embeddings and hidden (n, 32) of one sequence, from position 0 -> next hidden (n, 32), logits (n, 20)."""
    config, own = LlamaConfig(**CONFIG), {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}

    def normed(x: Tensor, name: str) -> Tensor:
        norm = LlamaRMSNorm(32, CONFIG["rms_norm_eps"])
        norm.weight.data = own[name]
        return norm(x)

    def heads(name: str) -> Tensor:
        return F.linear(both, own[MID + "self_attn." + name]).view(1, len(hidden), -1, 16).transpose(1, 2)

    both = torch.cat([normed(embeddings, MID + "input_layernorm"), normed(hidden, MID + "hidden_norm")], -1)
    cos, sin = LlamaRotaryEmbedding(config)(both, torch.arange(len(hidden))[None])
    query, key = apply_rotary_pos_emb(heads("q_proj"), heads("k_proj"), cos, sin)
    attended = F.scaled_dot_product_attention(query, key, heads("v_proj"), is_causal=True, enable_gqa=True)
    x = hidden + F.linear(attended.transpose(1, 2).flatten(2)[0], own[MID + "self_attn.o_proj"])
    inner = normed(x, MID + "post_attention_layernorm")
    gated = F.silu(F.linear(inner, own[MID + "mlp.gate_proj"])) * F.linear(inner, own[MID + "mlp.up_proj"])
    x = x + F.linear(gated, own[MID + "mlp.down_proj"])
    return x, F.linear(normed(x, "norm"), own["lm_head"])


def paged(
    head: EagleHead, make_ops: Callable[[list[AttentionLayer]], DecoderOps], num_blocks: int = 4, size: int = 4
) -> Callable[[int, int], Attend]:
    """Return what makes `attend` of places [first, last) of a sequence: a first chunk, or rows that are decoded."""
    geometry, length = head.geometry, num_blocks * size
    pools = [
        torch.full(((num_blocks + 5) * size, width), torch.nan, dtype=geometry.dtype) for width in geometry.row_sizes
    ]
    layer = AttentionLayer(head.rotary(length), *pools, head.shape.num_heads, size, 0, head.scaling)
    ops, table = make_ops([layer]), torch.randperm(num_blocks + 4)[None, :num_blocks] + 1

    def attend_of(first: int, last: int) -> Attend:
        at, count = torch.arange(first, last), last - first
        chunks = [ChunkView(0, last, None, None)] if first == 0 else []
        rows = table[0][at // size] * size + at % size
        mask = (torch.arange(length) <= at[:, None])[:, None, None]
        view = DecodeView(table.repeat(count, 1).flatten(), count, num_blocks, 0, length, mask)
        plain = GroupStep(rows, None if chunks else view, chunks)
        step = TableStep(table, torch.zeros(1, count).long(), 0 if chunks else count, chunks, has_drafts=True)
        return functools.partial(ops.attend, 0, group=step if ops.uses_tables else plain)

    return attend_of
