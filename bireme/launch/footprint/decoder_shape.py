"""How many parameters a decoder has, and the geometry of its attention, out of config.json.

The counts are the classes' own, biases and norms included: tests/launch/footprint/test_decoder_shape.py compares each
with transformers' model, and the geometry with what a probe pass of the engine sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from bireme.engines.torch.geometry import KvScales, LayerGeometry
from bireme.engines.torch.weights.dtypes import ITEM_BYTES
from bireme.errors import ConfigError
from bireme.launch.footprint.config_fields import MOST_LAYERS, ConfigFields, UncountedError
from bireme.launch.footprint.families import FAMILIES, Family, Flag

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTHS = ("intermediate_size", "ffn_dim")


class Parameters(NamedTuple):
    """Counts."""

    embeddings: int
    head: int  # lm_head; 0: it is the embeddings
    products: int  # matrices of the layers
    rest: int  # norms, biases, learned positions

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Widths count values, of one token."""

    architecture: str
    parameters: Parameters
    hidden: int
    vocab: int
    num_heads: int
    key_sizes: tuple[tuple[int, int, int], ...]  # a layer each: key/value heads, size of keys, of values
    windows: tuple[int, ...]  # a layer each; 0: it sees all
    mlp_width: int  # of the widest layer without experts, or shared expert
    expert_width: int  # of one expert
    experts_per_token: int  # 0: there are none
    num_experts: int
    writes_scores: bool  # of attention: torch's own has neither sinks nor caps
    text: ConfigFields

    def projection_sizes(self) -> dict[str, int]:
        """Return how many weights each projection of the layers has, by name. Not of experts, nor latent attention."""
        found: dict[str, int] = {}
        for layer, (kv_heads, key, value) in enumerate(self.key_sizes):
            widths = {
                "q": self.num_heads * key,
                "k": kv_heads * key,
                "v": kv_heads * value,
                "o": self.num_heads * value,
            }
            own = {f"self_attn.{name}_proj": width for name, width in widths.items()}
            own |= {f"mlp.{name}_proj": self.mlp_width for name in ("gate", "up", "down")}
            found |= {f"model.layers.{layer}.{name}": width * self.hidden for name, width in own.items()}
        return found

    def geometry(self, dtype: str, scales: KvScales | None = None) -> list[LayerGeometry]:
        """`scales`: KV is kept as 8-bit floats."""
        kept = cast(Any, _Dtype(dtype, ITEM_BYTES[dtype]))
        return [
            LayerGeometry(heads, key, value, window, kept, (), scales)
            for (heads, key, value), window in zip(self.key_sizes, self.windows, strict=True)
        ]


class _Dtype(NamedTuple):
    """What LayerGeometry asks of torch's."""

    name: str
    itemsize: int


def read_shape(config: ConfigFields) -> DecoderShape:
    """Raises ConfigError, UncountedError for a class that is not counted here."""
    text = config.block("text_config") or config
    name = _class_of(config, text)
    if name not in FAMILIES:
        raise UncountedError(f"{config.where}: {name or 'no architecture'}; its size is not counted here")
    family = FAMILIES[name]
    layers = text.size("num_hidden_layers", "n_layer", most=MOST_LAYERS)
    hidden, heads = text.size("hidden_size", "n_embd"), text.size("num_attention_heads", "n_head")
    vocab = text.size("vocab_size")
    keys = _key_sizes(text, family, hidden, heads)
    experts = _read_experts(text, layers) if family.has_experts else _NO_EXPERTS
    num_sparse = len(experts.layers)
    width = _mlp_width(text, family, hidden) if num_sparse < layers else 0
    products, rest = _attention(text, family, hidden, heads, keys)
    dense, mixture = _mlp(text, family, hidden, width), _mixture(text, family, hidden, experts)
    norms = family.num_norms * hidden * (1 + family.norms_have_bias)
    is_tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", family.is_tied))
    final = hidden * (1 + family.norms_have_bias) + vocab * family.has_head_bias
    if family.more_positions is not None:
        final += (text.size("max_position_embeddings", "n_positions") + family.more_positions) * hidden
    return DecoderShape(
        architecture=name,
        parameters=Parameters(
            vocab * hidden,
            0 if is_tied else vocab * hidden,
            products * layers + dense[0] * (layers - num_sparse) + mixture[0] * num_sparse,
            (rest + norms) * layers + dense[1] * (layers - num_sparse) + mixture[1] * num_sparse + final,
        ),
        hidden=hidden,
        vocab=vocab,
        num_heads=heads,
        key_sizes=(keys,) * layers,
        windows=tuple(_windows(text, family, name, layers)),
        mlp_width=max(width, _shared_width(text, family) if num_sparse else 0),
        expert_width=experts.width,
        experts_per_token=experts.per_token,
        num_experts=experts.number,
        writes_scores=_writes_scores(text, family),
        text=text,
    )


def _class_of(config: ConfigFields, text: ConfigFields) -> str:
    """Return the class of the language model, which one that takes pictures wraps."""
    if config.architecture in FAMILIES:
        return config.architecture
    if config.architecture == "Qwen2_5_VLForConditionalGeneration":
        return "Qwen2ForCausalLM"
    if text is not config:
        if text.architecture in FAMILIES:
            return text.architecture
        asked = f"{str(text.tree.get('model_type')).replace('_', '')}forcausallm"
        return next((name for name in FAMILIES if name.lower() == asked), config.architecture)
    return config.architecture


def _writes_scores(text: ConfigFields, family: Family) -> bool:
    return family.has_sinks or (family.has_caps and text.tree.get("attn_logit_softcapping", True) is not None)


def _is(text: ConfigFields, flag: Flag) -> bool:
    key, default = flag
    return text.flag(key, default) if key else default


def _key_sizes(text: ConfigFields, family: Family, hidden: int, heads: int) -> tuple[int, int, int]:
    if family.is_latent:  # the engine keeps keys and values of all heads
        nope, rope, value = (text.size(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return heads, nope + rope, value
    default = family.head_size if family.head_size and "head_dim" not in text.tree else hidden // heads
    size = text.size("head_dim", default=default)
    if size < 1:
        raise ConfigError(f"{text.where}: num_attention_heads: {heads} heads in {hidden} values; there are none left")
    kv_heads = text.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"{text.where}: num_key_value_heads: {kv_heads} does not divide {heads} heads")
    return kv_heads, size, size


def _attention(
    text: ConfigFields, family: Family, hidden: int, heads: int, keys: tuple[int, int, int]
) -> tuple[int, int]:
    """Return the parameters of one layer's matrices, and its others."""
    kv_heads, size, value = keys
    qkv_bias, output_bias = _is(text, family.qkv_bias), _is(text, family.output_bias)
    rest = hidden * output_bias + heads * family.has_sinks
    if family.is_latent:
        latent, rope = text.size("kv_lora_rank"), text.size("qk_rope_head_dim")
        rank = text.size("q_lora_rank", default=0, least=0)
        queries = (hidden + heads * size) * rank if rank else hidden * heads * size
        products = queries + hidden * (latent + rope) + latent * heads * (size - rope + value) + heads * value * hidden
        return products, rest + rank + latent + (rank + latent + rope) * qkv_bias
    rest += (heads + 2 * kv_heads) * size * qkv_bias
    rest += 2 * size * _is(text, family.head_norms) + (heads + kv_heads) * size * _is(text, family.whole_norms)
    return 2 * hidden * size * (heads + kv_heads), rest


class _Experts(NamedTuple):
    layers: frozenset[int]  # that have them
    number: int
    width: int  # of one
    per_token: int


_NO_EXPERTS = _Experts(frozenset(), 0, 0, 0)


def _read_experts(text: ConfigFields, layers: int) -> _Experts:
    sparse = _sparse_layers(text, layers)
    if not sparse:
        return _NO_EXPERTS
    count = text.size(*_EXPERTS)
    used = text.size("num_experts_per_tok", "experts_per_token", most=count)
    return _Experts(sparse, count, text.size("moe_intermediate_size", *_WIDTHS), used)


def _mlp_width(text: ConfigFields, family: Family, hidden: int) -> int:
    return text.size("n_inner", default=4 * hidden) if family.more_positions == 0 else text.size(*_WIDTHS)


def _mlp(text: ConfigFields, family: Family, hidden: int, width: int) -> tuple[int, int]:
    return (2 + family.is_gated) * hidden * width, (hidden + (1 + family.is_gated) * width) * _is(text, family.mlp_bias)


def _mixture(text: ConfigFields, family: Family, hidden: int, experts: _Experts) -> tuple[int, int]:
    if not experts.number:
        return 0, 0
    products = (3 * hidden * experts.width + hidden) * experts.number
    products += 3 * hidden * _shared_width(text, family) + hidden * family.has_shared_gate
    return products, experts.number * (2 * experts.width + hidden + 1) * family.experts_have_bias


def _shared_width(text: ConfigFields, family: Family) -> int:
    if family.has_shared_gate:
        return text.size("shared_expert_intermediate_size")
    # Others have no key of that name, or have it in a form that their class does not read.
    default = 1 if family.is_latent else 0
    shared = text.size("n_shared_experts", default=default, least=0, most=1 << 16)
    return shared * text.size("moe_intermediate_size", default=0, least=0)


def _sparse_layers(text: ConfigFields, layers: int) -> frozenset[int]:
    first = text.size("first_k_dense_replace", default=0, least=0)
    step = text.size("decoder_sparse_step", default=1)
    dense = text.indices("mlp_only_layers")
    return frozenset(layer for layer in range(first, layers) if (layer + 1) % step == 0) - dense


def _windows(text: ConfigFields, family: Family, name: str, layers: int) -> list[int]:
    if not family.heeds_window or (family.asks_for_window and not text.flag("use_sliding_window", False)):
        return [0] * layers
    is_told = "sliding_window" in text.tree
    window = text.size("sliding_window", default=0 if is_told else family.window, least=0)
    if kinds := text.kinds("layer_types", layers):
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    sliding = _sliding_layers(text, family, name, layers)
    return [window if layer in sliding else 0 for layer in range(layers)]


def _sliding_layers(text: ConfigFields, family: Family, name: str, layers: int) -> set[int]:
    """Return those that have the window where config.json lists no layer_types."""
    if name == "Qwen2MoeForCausalLM":
        return set(range(0, min(layers, text.size("max_window_layers", default=28, least=0)), 2))
    if name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Dots1ForCausalLM"):
        return set(range(text.size("max_window_layers", default=28, least=0), layers))
    every = text.size("sliding_window_pattern", default=family.full_every, least=0, most=MOST_LAYERS)
    return {layer for layer in range(layers) if not every or (layer + 1) % every}
