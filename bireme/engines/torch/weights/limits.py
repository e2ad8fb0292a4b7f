"""What one engine can take, computed from its settings, the model and the memory; refusals name the key."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bireme.config import EngineConfig
from bireme.engines.torch.geometry import EngineLimits, LayerGeometry
from bireme.engines.torch.weights.architectures import position_limit
from bireme.errors import ConfigError
from bireme.settings import QuantConfig

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("bireme.engines.torch")

FP8 = "fp8"  # of kv_cache_config.dtype
FP8_REMEDY = "set auto, or take a GPU of compute capability 8.9 or more"
_BATCH_SIZE = 64
_NUM_TOKENS = 2048  # enough to keep a GPU busy; running streams stand still for a step of so many
_LOGPROB_ELEMENTS = 1 << 25  # logits kept at once for prompt log probabilities


def resolve_limits(config: EngineConfig, model_config: Any) -> EngineLimits:
    """Fill in unset values. Raises ConfigError naming key, value and remedy."""
    max_seq_len = _max_seq_len(config, model_config)
    max_num_tokens = _at_least_one("max_num_tokens", config.max_num_tokens, _NUM_TOKENS)
    max_batch_size = _at_least_one("max_batch_size", config.max_batch_size, min(_BATCH_SIZE, max_num_tokens))
    if max_num_tokens < max_batch_size:
        raise ConfigError(
            f"max_num_tokens: {max_num_tokens} is less than max_batch_size {max_batch_size}: a step could not take"
            " one token of each request; raise the one or lower the other"
        )
    scheduler, size = config.scheduler_config, config.kv_cache_config.tokens_per_block
    if scheduler.max_stream_gap_ms and not config.enable_chunked_prefill:
        raise ConfigError(
            f"scheduler_config.max_stream_gap_ms: {scheduler.max_stream_gap_ms:g} needs prompts in parts, and"
            " enable_chunked_prefill is false; set that to true, or remove the bound"
        )
    speculation = config.speculative_config
    max_draft_len = (speculation.max_draft_len or 0) if speculation is not None and speculation.decoding_type else 0
    if max_draft_len >= max_num_tokens:
        raise ConfigError(
            f"speculative_config.max_draft_len: {max_draft_len}; a step verifies a draft with the token before it, and"
            f" takes {max_num_tokens} tokens (max_num_tokens); lower the one or raise the other"
        )
    if size < 1:
        raise ConfigError(f"kv_cache_config.tokens_per_block: {size}; at least 1, e.g. 32")
    return EngineLimits(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        max_input_len=min(_at_least_one("max_input_len", config.max_input_len, max_seq_len - 1), max_seq_len - 1),
        tokens_per_block=size,
        enable_chunked_prefill=config.enable_chunked_prefill,
        may_preempt=scheduler.capacity_scheduler_policy == "MAX_UTILIZATION",
        max_logprob_rows=max(1, _LOGPROB_ELEMENTS // model_config.vocab_size),
        max_queue_size=_at_least_one("scheduler_config.max_queue_size", scheduler.max_queue_size, 1),
        max_queue_time_s=scheduler.max_queue_time_s,
        best_effort_share=scheduler.best_effort_share,
        max_stream_gap_s=scheduler.max_stream_gap_ms / 1e3,
        max_draft_len=max_draft_len,
        overlaps=not config.disable_overlap_scheduler,
    )


def narrow_windows(
    geometry: Sequence[LayerGeometry], windows: Sequence[int] | None, longest: int
) -> list[LayerGeometry]:
    """Apply kv_cache_config.max_attention_window, a list repeated over the layers: the smaller window counts.

    An entry of the model's longest sequence or more (`longest`; 0: unknown) is no window, as in TensorRT-LLM.
    """
    if windows is None:
        return list(geometry)
    if not windows or any(window < 1 for window in windows):
        raise ConfigError(f"kv_cache_config.max_attention_window: {list(windows)}; one or more positive numbers")
    narrowed = []
    for index, layer in enumerate(geometry):
        window = windows[index % len(windows)]
        if longest and window >= longest:
            window = layer.window
        narrowed.append(dataclasses.replace(layer, window=min(layer.window or window, window)))
    return narrowed


def draft_config(config: EngineConfig) -> EngineConfig:
    """Return the settings of an engine's draft model: without what is said of the target's weights and KV."""
    cache = msgspec.structs.replace(config.kv_cache_config, dtype="auto", max_attention_window=None)
    return msgspec.structs.replace(config, quant_config=QuantConfig(), kv_cache_config=cache, speculative_config=None)


def longest_sequence(model_config: Any) -> int:
    """Return the tokens that a model was made for; 0: its configuration does not say."""
    trained = int(getattr(model_config, "max_position_embeddings", 0) or 0)
    return min(filter(None, (trained, position_limit(model_config))), default=0)


def _max_seq_len(config: EngineConfig, model_config: Any) -> int:
    constant, own = position_limit(model_config), longest_sequence(model_config)
    asked = config.max_seq_len
    if asked is not None and asked < 2:
        raise ConfigError(f"max_seq_len: {asked}; at least 2, one prompt token and one generated")
    if not own:
        if asked is None:
            raise ConfigError("max_seq_len: not set, and config.json has no max_position_embeddings; set it")
        return asked
    if asked is not None and asked > own:
        why = "its rotary scaling is not constant beyond" if constant == own else "the model was made for"
        raise ConfigError(f"max_seq_len: {asked}; {why} {own} tokens; lower it to {own}")
    return asked or own


def _at_least_one(name: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise ConfigError(f"{name}: {value}; at least 1")
    return default if value is None else value


def why_no_fp8_kv(has_kernels: bool) -> str:
    """Return why KV in 8-bit floats is refused; empty: kernels attend to it."""
    return "" if has_kernels else "a CPU, or a GPU without triton, does not attend to 8-bit floats"


def check_kv_dtype(asked: str, dtype: torch.dtype) -> None:
    own = str(dtype).removeprefix("torch.")
    if asked not in ("auto", own, FP8):
        raise ConfigError(
            f"kv_cache_config.dtype: {asked}; the torch engine keeps KV in the model's {own}, or on a GPU as {FP8};"
            " use auto"
        )
