"""An answer's usage, in OpenAI's words, and its times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bireme.messages import Usage


def usage_json(usages: Sequence[Usage], num_reasoning: int = 0) -> dict[str, Any]:
    """Return OpenAI's `usage` of n answers to one prompt: the prompt counts once, the answers each."""
    first = usages[0]
    num_completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": num_completion,
        "total_tokens": first.prompt_tokens + num_completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def timing_json(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the answer's `bireme` object: times in ms and workers, one entry a choice."""
    return {"timing": [_timing(usage) for usage in usages]}


def server_timing(usage: Usage, total_s: float) -> bytes:
    """Return the value of a Server-Timing header : ms of the first choice's stages and of the request."""
    stages = ("queue", "prefill", "transfer", "decode")
    parts = [f"{stage};dur={getattr(usage, stage + '_ms'):.3f}" for stage in stages]
    return ", ".join([*parts, f"total;dur={total_s * 1e3:.3f}"]).encode()


def _timing(usage: Usage) -> dict[str, Any]:
    return {
        "queue_ms": round(usage.queue_ms, 3),
        "prefill_ms": round(usage.prefill_ms, 3),
        "transfer_ms": round(usage.transfer_ms, 3),
        "decode_ms": round(usage.decode_ms, 3),
        "prefill_worker": usage.prefill_worker or usage.decode_worker,
        "decode_worker": usage.decode_worker,
        "cached_tokens": usage.cached_tokens,
        "predicted_cached_tokens": usage.predicted_cached_tokens,
    }
