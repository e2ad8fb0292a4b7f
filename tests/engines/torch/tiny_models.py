"""Tiny random models for the engine's tests: heads untied, weights wide, so that greedy output varies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 512
EOS = 2
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = {
    "sliding_window": 32,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def build(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random fp32 model of this type in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in (BASE | changes).items() if value is not None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight) * 0.5)  # a new tensor: no longer tied
    return model.requires_grad_(False)


def save(folder: Path, model_type: str, **changes: Any) -> str:
    model = build(model_type, **changes)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return str(folder)


def generate(model: Any, prompt: list[int], num_tokens: int, eos: int | None = None) -> list[int]:
    """Return what transformers' own greedy `generate` makes of it."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()
