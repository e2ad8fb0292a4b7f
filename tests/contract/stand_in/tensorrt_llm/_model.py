"""The model that the stand-in computes with: Llama's plain form by itself, since it starts and steps several times as
fast as in transformers, on which most of the tests' time would go; every other architecture by transformers.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FIRST_POSITIONS = 512  # that rotary angles are made for at the start: those of all would be half of its CPU
_PLAIN = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def import_transformers() -> None:
    """Where it is needed and as far: its whole would be half of the CPU that an engine's start takes."""
    from bireme.engines.torch.weights import lean_imports

    lean_imports.import_transformers()


def load_tokenizer(folder: str | Path) -> Any:
    """By its own class: AutoTokenizer imports the model's configuration, and with it half of transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def load(folder: Path, dtype: torch.dtype) -> Llama | Transformers:
    tree = json.loads((folder / "config.json").read_text())
    rope = tree.get("rope_parameters", {})
    if "vision_config" in tree:
        return _loaded_once(Pictured, folder, dtype)
    if all(tree.get(name) == value for name, value in _PLAIN.items()) and rope.get("rope_type") == "default":
        return Llama(folder, tree, dtype)
    return _loaded_once(Transformers, folder, dtype)


@functools.cache
def _loaded_once(kind: type[Transformers], folder: Path, dtype: torch.dtype) -> Transformers:
    """Engines of one process share what none of them changes: to load it is most of their start."""
    return kind(folder, dtype)


@dataclass
class LayerCache:
    keys: Tensor  # (1, heads, tokens, head_dim)
    values: Tensor


@dataclass
class Cache:
    """Keys and values of one sequence, all of every layer. transformers' names."""

    layers: list[LayerCache] = field(default_factory=list)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if layer == len(self.layers):
            self.layers.append(LayerCache(keys, values))
        else:
            held = self.layers[layer]
            held.keys, held.values = torch.cat((held.keys, keys), 2), torch.cat((held.values, values), 2)
        return self.layers[layer].keys, self.layers[layer].values


class Llama:
    """transformers' LlamaForCausalLM, one sequence at a time. Used by one thread, without gradients."""

    def __init__(self, folder: Path, tree: dict[str, Any], dtype: torch.dtype) -> None:
        """Raises OSError or ValueError."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = {name: weight.to(dtype) for name, weight in load_file(folder / "model.safetensors").items()}
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        self.text_config = SimpleNamespace(**tree)
        self._weights, self._eps = weights, tree["rms_norm_eps"]
        self._embeddings = weights["model.embed_tokens.weight"]
        self._head = weights.get("lm_head.weight", self._embeddings).t().contiguous()  # half the time for one row
        self._num_turned = tree["num_attention_heads"] + tree["num_key_value_heads"]
        self._num_heads, self._head_dim = tree["num_attention_heads"], tree["head_dim"]
        for layer in range(tree["num_hidden_layers"]):  # what has one input is one product: a step is mostly calls
            name = f"model.layers.{layer}."
            self._join(f"{name}self_attn.", ("q_proj", "k_proj", "v_proj"))
            self._join(f"{name}mlp.", ("gate_proj", "up_proj"))
        self._frequencies = tree["rope_parameters"]["rope_theta"] ** -(
            torch.arange(0, self._head_dim, 2).float() / self._head_dim
        )
        self._dtype = dtype
        self._turn_up_to(_FIRST_POSITIONS)

    def _join(self, name: str, parts: tuple[str, ...]) -> None:
        self._weights[f"{name}joint.weight"] = torch.cat([self._weights.pop(f"{name}{part}.weight") for part in parts])

    def _turn_up_to(self, num_positions: int) -> None:
        angles = torch.outer(torch.arange(num_positions), self._frequencies)
        angles = torch.cat((angles, angles), -1)
        self._cos, self._sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def new_cache(self) -> Cache:
        return Cache()

    def logits(self, ids: list[int], cache: Cache, media: Any = None) -> Tensor:
        """Return (len(ids), vocabulary), and add the keys and values of `ids` to the cache."""
        held = cache.layers[0].keys.shape[2] if cache.layers else 0
        end = held + len(ids)
        if end > len(self._cos):
            self._turn_up_to(2 * end)
        cos, sin = self._cos[held:end], self._sin[held:end]
        x = self._embeddings[ids[0] : ids[0] + 1] if len(ids) == 1 else self._embeddings[ids]
        for layer in range(self.text_config.num_hidden_layers):
            name = f"model.layers.{layer}."
            x = x + self._attend(name, self._norm(x, name + "input_layernorm"), cos, sin, cache, layer)
            inner = self._norm(x, name + "post_attention_layernorm")
            gate, up = self._linear(inner, name + "mlp.joint").chunk(2, -1)
            x = x + self._linear(F.silu(gate) * up, name + "mlp.down_proj")
        return self._norm(x, "model.norm") @ self._head

    def _attend(self, name: str, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, layer: int) -> Tensor:
        joint = self._linear(x, name + "self_attn.joint").view(1, len(x), -1, self._head_dim).transpose(1, 2)
        turned = _rotate(joint[:, : self._num_turned], cos, sin)
        q, k = turned[:, : self._num_heads], turned[:, self._num_heads :]
        keys, values = cache.update(k, joint[:, self._num_turned :], layer)
        mask = None
        if len(x) > 1:
            mask = torch.ones(len(x), keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - len(x))
        out = F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
        return self._linear(out[0].transpose(0, 1).reshape(len(x), -1), name + "self_attn.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[name + ".weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[name + ".weight"], self._eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Transformers:
    """Any architecture."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Raises OSError, ValueError or RuntimeError."""
        import_transformers()
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        self.text_config = self._model.config.get_text_config()

    def new_cache(self) -> Any:
        """Keep all keys and values of every layer: a window's layer alone could not be continued elsewhere."""
        from transformers import DynamicCache

        return DynamicCache()

    def logits(self, ids: list[int], cache: Any, media: Any = None) -> Tensor:
        logits: Tensor = self._model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0]
        return logits


class Pictured(Transformers):
    """A model that sees: the embeddings of a prompt's pictures stand in place of tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        import_transformers()
        from transformers import AutoModelForImageTextToText

        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        self.text_config = self._model.config.get_text_config()

    def logits(self, ids: list[int], cache: Any, media: Any = None) -> Tensor:
        """Without positions from the request they are those of text, which is wrong behind a picture of Qwen2.5-VL."""
        inner, held = self._model.model.language_model, cache.get_seq_length()
        known = torch.tensor([ids]).clamp(max=self.text_config.vocab_size - 1)  # others stand for a picture
        rows = inner.get_input_embeddings()(known)
        if not held:
            for first, embeddings in zip(media.positions, media.embeddings, strict=True):
                rows[0, first : first + len(embeddings)] = embeddings.to(rows.dtype)
        places = {}
        if media.mrope is not None:
            prompt, delta = media.mrope
            later = held + torch.arange(len(ids)) + int(delta)
            places["position_ids"] = later.expand(3, 1, -1) if held else prompt
        states = inner(inputs_embeds=rows, past_key_values=cache, use_cache=True, **places).last_hidden_state
        logits: Tensor = self._model.lm_head(states)[0]
        return logits
