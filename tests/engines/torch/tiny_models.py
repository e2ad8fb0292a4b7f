"""Tiny random models for the engine's tests: heads untied, weights wide, so that greedy output varies."""

from __future__ import annotations

import tempfile
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

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
W16 = {"sliding_window": 16}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
# model type -> settings beyond tiny_models.BASE; None takes a setting away
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": W16,
    "ministral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": MOE | {"mlp_only_layers": [1]},
    "mixtral": LOCAL_MOE | W16,
    "gemma": {},
    "gemma2": W16 | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0, "num_hidden_layers": 4},
    "gemma3_text": W16 | ALTERNATING | {"query_pre_attn_scalar": 16},
    "phi3": {},
    "phi": {},
    "olmo2": {},
    "olmo3": W16 | ALTERNATING,
    "granite": {},
    "cohere": {},
    "cohere2": W16 | ALTERNATING,
    "starcoder2": W16,
    "glm4": {},
    "smollm3": {},
    "gpt_oss": LOCAL_MOE | W16 | ALTERNATING,
    "exaone4": W16 | {"sliding_window_pattern": 4, "num_hidden_layers": 4},
    "nemotron": {},
    "stablelm": {},
    "ernie4_5": {},
    "seed_oss": {},
    "deepseek_v3": DEEPSEEK | MLA | {"num_key_value_heads": 4, "head_dim": None},
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "hidden_size": None,
        "num_key_value_heads": None,
        "head_dim": None,
    },
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_key_value_heads": None, "head_dim": None},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "hunyuan_v1_dense": {},
    "dots1": DEEPSEEK | {"n_shared_experts": 1},
}

_written: dict[tuple[str, str], tuple[dict[str, bytes], torch.Tensor]] = {}  # a model's files, and what comes after


def build(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random fp32 model of this type in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in (BASE | changes).items() if value is not None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("proj.bias"):  # which are zeros
            torch.nn.init.normal_(parameter, std=0.15)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight) * 0.5)  # a new tensor: no longer tied
    return model.requires_grad_(False)


def save(folder: Path, model_type: str, **changes: Any) -> str:
    """Write the model that `build` makes. What this process has written before, it has kept."""
    key = model_type, repr(sorted(changes.items()))
    if key not in _written:
        model = build(model_type, **changes)
        model.generation_config.eos_token_id = EOS
        model.generation_config.pad_token_id = 0
        with tempfile.TemporaryDirectory() as made:
            model.save_pretrained(made)
            files = {file.name: file.read_bytes() for file in Path(made).iterdir()}
        _written[key] = files, torch.get_rng_state()
    files, state = _written[key]
    torch.set_rng_state(state)  # as `build` leaves it
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return str(folder)


def generate(model: Any, prompts: list[list[int]], num_tokens: int, eos: int | None = None) -> list[list[int]]:
    """Return what transformers' own greedy `generate` makes of each: of all at once, for a tenth of the CPU."""
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    is_real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        output = model.generate(
            padded,
            attention_mask=is_real,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )
    return [row[: row.index(eos) + 1] if eos in row else row for row in output[:, width:].tolist()]
