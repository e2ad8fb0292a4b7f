"""The made model on the CPU in float32: what the logits of each token should be.

Llama's plain form, which a test holds against transformers. It needs torch alone, so that each process of a proof can
have it within a second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._weights = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
        self._num_layers, self._head_dim = config["num_hidden_layers"], config["head_dim"]
        self._eps = config["rms_norm_eps"]
        # Where transformers 4 and 5 write it.
        self._theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return (len(tokens), vocabulary): behind each of them."""
        x = self._weights["model.embed_tokens.weight"][list(tokens)]
        steps = self._theta ** (-torch.arange(0, self._head_dim, 2).float() / self._head_dim)
        angles = torch.outer(torch.arange(len(tokens)).float(), steps).repeat(1, 2)
        for layer in range(self._num_layers):
            name = f"model.layers.{layer}."
            x = x + self._attend(name + "self_attn.", self._norm(x, name + "input_layernorm"), angles)
            inner = self._norm(x, name + "post_attention_layernorm")
            gated = F.silu(self._linear(inner, name + "mlp.gate_proj")) * self._linear(inner, name + "mlp.up_proj")
            x = x + self._linear(gated, name + "mlp.down_proj")
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def _attend(self, name: str, x: Tensor, angles: Tensor) -> Tensor:
        query, key, value = (
            self._linear(x, f"{name}{one}_proj").unflatten(-1, (-1, self._head_dim)).transpose(0, 1) for one in "qkv"
        )
        query, key = _rotated(query, angles), _rotated(key, angles)
        times = len(query) // len(key)  # query heads that share a pair of key and value
        key, value = key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._linear(mixed.transpose(0, 1).flatten(1), name + "o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[name + ".weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[name + ".weight"], self._eps)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
