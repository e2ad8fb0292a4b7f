"""Which of a GGUF file's weights stay in its blocks on a CPU, by their types. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bireme.gguf.architectures import Weight

KEPT_TYPES = ("Q4_0", "Q4_1", "Q8_0")
LAYER = (  # its matrices: qkv, output, gate and up, and down
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def names_of(layer: int, names: Sequence[str]) -> list[str]:
    return [f"model.layers.{layer}.{name}.weight" for name in names]


def are_kept(weights: Mapping[str, Weight], names: Sequence[str]) -> bool:
    """Return whether weights that are one matrix stay; all do, or none."""
    return all(name in weights and _is_kept(weights[name]) for name in names)


def _is_kept(weight: Weight) -> bool:
    return len(weight.parts) == 1 and len(weight.shape) == 2 and weight.parts[0].type.name in KEPT_TYPES
