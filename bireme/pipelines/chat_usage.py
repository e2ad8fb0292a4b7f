"""An answer's usage, in OpenAI's words, and its times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bireme.messages import Usage


def usage_json(usages: Sequence[Usage], num_reasoning: int = 0) -> dict[str, Any]:
    """Return OpenAI's `usage` of n answers to one prompt: the prompt counts once, the answers each."""
    first = usages[0]
    num_completion = sum(usage.completion_tokens for usage in usages)
    details = {"reasoning_tokens": num_reasoning} | drafts_json(usages)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": num_completion,
        "total_tokens": first.prompt_tokens + num_completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": details,
    }


def drafts_json(usages: Sequence[Usage]) -> dict[str, int]:
    """Return what became of drafts: tokens that an answer has, and others; {} where there were none."""
    drafted = sum(usage.drafted_tokens for usage in usages)
    if not drafted:
        return {}
    accepted = sum(usage.num_accepted for usage in usages)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def timing_json(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the answer's `bireme` object: times in ms and workers, one entry a choice."""
    return {"timing": [_timing(usage) for usage in usages]}


@dataclass(frozen=True, slots=True)
class NvExtReply:
    """What an answer has of Dynamo's `nvext`: the fields that the request named in `nvext.extra_fields`."""

    fields: Sequence[str] = ()  # worker_id, timing
    arrived_at: float = 0.0  # on time.monotonic

    def json(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Return the answer's field, {} where nothing was asked for: of its first choice, times in ms."""
        if not self.fields:
            return {}
        usage = usages[0]
        shown: dict[str, dict[str, Any]] = {}
        if "worker_id" in self.fields:
            shown["worker_id"] = {
                "prefill_worker_id": usage.prefill_worker or usage.decode_worker,
                "decode_worker_id": usage.decode_worker,
            }
        if "timing" in self.fields:
            total_ms = 1e3 * (time.monotonic() - self.arrived_at)
            shown["timing"] = {
                "request_received_ms": int(1e3 * time.time() - total_ms),  # since 1970
                "prefill_wait_time_ms": round(usage.queue_ms, 3),
                "prefill_time_ms": round(usage.prefill_ms, 3),
                "ttft_ms": round(max(0.0, total_ms - usage.decode_ms), 3),
                "total_time_ms": round(total_ms, 3),
                "kv_hit_rate": round(usage.cached_tokens / max(usage.prompt_tokens, 1), 4),
                "kv_transfer_estimated_latency_ms": round(usage.transfer_ms, 3),
            }
        return {"nvext": shown}


NO_NVEXT = NvExtReply()


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
