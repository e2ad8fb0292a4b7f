"""What differs between the classes of the torch engine, as far as it has a size."""

from __future__ import annotations

from dataclasses import dataclass

Flag = tuple[str, bool]  # a key of config.json, and what holds without it
_NO, _YES = ("", False), ("", True)
_ATTENTION, _MLP = ("attention_bias", False), ("mlp_bias", False)
_GROUP_WINDOW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Defaults are Llama's. Of what config.json leaves out the class's own default counts."""

    qkv_bias: Flag = _NO
    output_bias: Flag = _NO
    mlp_bias: Flag = _NO
    is_gated: bool = True  # the MLP
    num_norms: int = 2  # of a layer
    norms_have_bias: bool = False
    head_norms: Flag = _NO  # of queries and keys, as wide as a head
    whole_norms: Flag = _NO  # of queries and keys, as wide as all heads
    has_head_bias: bool = False  # lm_head
    is_tied: bool = False  # tie_word_embeddings
    has_experts: bool = False
    experts_have_bias: bool = False
    has_shared_gate: bool = False
    has_sinks: bool = False
    has_caps: bool = False  # attn_logit_softcapping
    is_latent: bool = False  # multi-head latent attention
    more_positions: int | None = None  # learned ones beyond max_position_embeddings; None: none are learned
    head_size: int = 0  # head_dim; 0: hidden_size / num_attention_heads
    heeds_window: bool = False  # sliding_window
    window: int = 0  # sliding_window
    full_every: int = 0  # without layer_types: every such layer sees all, the others a window; 0: all have it
    asks_for_window: bool = False  # use_sliding_window


def _llama(**changes: object) -> Family:
    return Family(**({"qkv_bias": _ATTENTION, "output_bias": _ATTENTION, "mlp_bias": _MLP} | changes))  # type: ignore[arg-type]


def _with_attention_bias(**changes: object) -> Family:
    return _llama(mlp_bias=_NO, **changes)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _llama(),
    "MistralForCausalLM": Family(heeds_window=True, window=_GROUP_WINDOW),
    "MinistralForCausalLM": Family(heeds_window=True, window=_GROUP_WINDOW),
    "Qwen2ForCausalLM": Family(qkv_bias=_YES, heeds_window=True, asks_for_window=True, window=_GROUP_WINDOW),
    "Qwen3ForCausalLM": _with_attention_bias(
        head_norms=_YES, head_size=128, heeds_window=True, asks_for_window=True, window=_GROUP_WINDOW
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=("qkv_bias", True),
        has_experts=True,
        has_shared_gate=True,
        heeds_window=True,
        asks_for_window=True,
        window=_GROUP_WINDOW,
    ),
    "Qwen3MoeForCausalLM": _with_attention_bias(
        head_norms=_YES, has_experts=True, heeds_window=True, asks_for_window=True, window=_GROUP_WINDOW
    ),
    "MixtralForCausalLM": Family(has_experts=True, heeds_window=True),
    "GemmaForCausalLM": _with_attention_bias(is_tied=True, head_size=256),
    "Gemma2ForCausalLM": _with_attention_bias(
        is_tied=True,
        head_size=256,
        num_norms=4,
        has_caps=True,
        heeds_window=True,
        window=_GROUP_WINDOW,
        full_every=2,
    ),
    "Gemma3ForCausalLM": _with_attention_bias(
        is_tied=True,
        head_size=256,
        num_norms=4,
        head_norms=_YES,
        heeds_window=True,
        window=_GROUP_WINDOW,
        full_every=6,
    ),
    "Phi3ForCausalLM": Family(heeds_window=True),
    "PhiForCausalLM": Family(
        qkv_bias=_YES,
        output_bias=_YES,
        mlp_bias=_YES,
        is_gated=False,
        num_norms=1,
        norms_have_bias=True,
        has_head_bias=True,
    ),
    "Olmo2ForCausalLM": _with_attention_bias(whole_norms=_YES),
    "Olmo3ForCausalLM": _with_attention_bias(whole_norms=_YES, heeds_window=True, window=_GROUP_WINDOW, full_every=4),
    "GraniteForCausalLM": _llama(),
    "CohereForCausalLM": _with_attention_bias(num_norms=1, is_tied=True, whole_norms=("use_qk_norm", False)),
    "Cohere2ForCausalLM": _with_attention_bias(
        num_norms=1, is_tied=True, heeds_window=True, window=_GROUP_WINDOW, full_every=4
    ),
    "Starcoder2ForCausalLM": Family(
        qkv_bias=("use_bias", True),
        output_bias=("use_bias", True),
        mlp_bias=("use_bias", True),
        is_gated=False,
        norms_have_bias=True,
        is_tied=True,
        heeds_window=True,
    ),
    "Glm4ForCausalLM": Family(qkv_bias=("attention_bias", True), num_norms=4, head_size=128),
    "SmolLM3ForCausalLM": _llama(is_tied=True, heeds_window=True, asks_for_window=True),
    "GptOssForCausalLM": Family(
        qkv_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
        has_experts=True,
        experts_have_bias=True,
        has_sinks=True,
        head_size=64,
        heeds_window=True,
        window=128,
        full_every=2,
    ),
    "Exaone4ForCausalLM": Family(head_norms=_YES, heeds_window=True, window=_GROUP_WINDOW, full_every=4),
    "NemotronForCausalLM": _llama(is_gated=False, norms_have_bias=True),
    "StableLmForCausalLM": Family(qkv_bias=("use_qkv_bias", False), norms_have_bias=True),
    "Ernie4_5ForCausalLM": Family(
        qkv_bias=("use_bias", False),
        output_bias=("use_bias", False),
        mlp_bias=("use_bias", False),
        is_tied=True,
        head_size=128,
    ),
    "SeedOssForCausalLM": Family(
        qkv_bias=("attention_bias", True), output_bias=("attention_out_bias", False), mlp_bias=_MLP, head_size=128
    ),
    "DeepseekV3ForCausalLM": Family(qkv_bias=_ATTENTION, output_bias=_ATTENTION, has_experts=True, is_latent=True),
    "GPT2LMHeadModel": Family(
        qkv_bias=_YES,
        output_bias=_YES,
        mlp_bias=_YES,
        is_gated=False,
        norms_have_bias=True,
        is_tied=True,
        more_positions=0,
    ),
    "OPTForCausalLM": Family(
        qkv_bias=("enable_bias", True),
        output_bias=("enable_bias", True),
        mlp_bias=("enable_bias", True),
        is_gated=False,
        norms_have_bias=True,
        is_tied=True,
        more_positions=2,
    ),
    "GPTNeoXForCausalLM": Family(
        qkv_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
        mlp_bias=_YES,
        is_gated=False,
        norms_have_bias=True,
    ),
    "HunYuanDenseV1ForCausalLM": _with_attention_bias(head_norms=_YES),
    "Dots1ForCausalLM": _with_attention_bias(
        head_norms=_YES, has_experts=True, heeds_window=True, window=_GROUP_WINDOW
    ),
}
