"""Which transformers classes this engine runs: those whose greedy output was proved equal to `generate`.

A class is fit when every layer calls the attention interface, keeps no other state between tokens, and passes its
window, softcap and sinks along. tests/engines/torch/test_architectures.py proves each.
"""

from __future__ import annotations

import difflib
from typing import Any

from bireme.errors import ConfigError

PROVED = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MinistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "GraniteForCausalLM",
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "Starcoder2ForCausalLM",
        "Glm4ForCausalLM",
        "SmolLM3ForCausalLM",
        "GptOssForCausalLM",
        "Exaone4ForCausalLM",
        "NemotronForCausalLM",
        "StableLmForCausalLM",
        "Ernie4_5ForCausalLM",
        "SeedOssForCausalLM",
        "DeepseekV3ForCausalLM",
        "GPT2LMHeadModel",
        "OPTForCausalLM",
        "GPTNeoXForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "Dots1ForCausalLM",
    }
)
PROVED_WITH_PICTURES = frozenset(
    {"LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}
)
# Those that have decoders of this engine's own, `forward/decoder_weights.py`.
FAMILIES: tuple[str, ...] = (
    *("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "SeedOssForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"),
    *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"),
)
_REASONS = {
    "FalconForCausalLM": "its layers do not use the attention interface",
    "Llama4ForCausalLM": "chunked attention is not passed to the attention interface",
    "Llama4ForConditionalGeneration": "chunked attention is not passed to the attention interface",
    "Gemma3nForCausalLM": "its layers share KV through a cache object",
    "Gemma3nForConditionalGeneration": "its layers share KV through a cache object",
    "Gemma4ForCausalLM": "its layers share KV through a cache object",
    "MambaForCausalLM": "state-space layers keep a state that is not paged KV",
    "Mamba2ForCausalLM": "state-space layers keep a state that is not paged KV",
    "JambaForCausalLM": "state-space layers keep a state that is not paged KV",
    "Qwen3NextForCausalLM": "linear-attention layers keep a state that is not paged KV",
    "T5ForConditionalGeneration": "it is an encoder-decoder model",
    "BartForConditionalGeneration": "it is an encoder-decoder model",
}


def architecture_of(config: Any) -> str:
    """Return the class name of a transformers config. Raises ConfigError where it has none."""
    # Of the object itself: an attribute of Qwen2.5-VL's config is its language model's in transformers 4.
    names = list(vars(config).get("architectures") or [])
    if not names:
        raise ConfigError('config.json names no architecture; add `architectures`, e.g. ["LlamaForCausalLM"]')
    return str(names[0])


def is_picture_model(name: str) -> bool:
    return name in PROVED_WITH_PICTURES


def check_architecture(config: Any) -> str:
    """Return the class name of a transformers config. Raises ConfigError for what this engine can't run."""
    name = architecture_of(config)
    if name in PROVED_WITH_PICTURES:
        _check_language_model(name, config)
    elif name not in PROVED:
        raise ConfigError(f"{name}: not supported by the torch engine: {_reason(name)}")
    return name


def _check_language_model(name: str, config: Any) -> None:
    """LLaVA wraps any language model, which must be proved as well."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get_text_config().model_type
    inner = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind)
    if name == "LlavaForConditionalGeneration" and inner not in PROVED:
        raise ConfigError(f"{name} around {inner}: not supported by the torch engine: {_reason(str(inner))}")


def _reason(name: str) -> str:
    if name in _REASONS:
        return _REASONS[name]
    near = difflib.get_close_matches(name, PROVED, n=1, cutoff=0.85)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = sorted(PROVED | PROVED_WITH_PICTURES)
    return f"its output has not been proved equal to transformers' generate{hint} (known: {', '.join(known)})"


def position_limit(config: Any) -> int | None:
    """Return the longest sequence whose rotary embedding does not depend on its length; None: no limit.

    `dynamic` and `longrope` scaling choose their frequencies by the longest position of the whole packed batch; up to
    the original length they are constant, beyond it requests would disturb each other.
    """
    limits = [
        int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in _ropes(config)
        if (rope.get("rope_type") or rope.get("type")) in ("dynamic", "longrope", "su")
    ]
    return min(limits, default=None)


def _ropes(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [entry for entry in rope.values() if isinstance(entry, dict)]
    return nested or [rope]
