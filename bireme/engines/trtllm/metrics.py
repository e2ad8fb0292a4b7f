"""Accounts: the usage that ends each request, and bireme's own metrics of this engine.

Times are of wall clocks here; with `return_perf_metrics` TensorRT-LLM's own give a request's time in the queue and of
its KV transfer.
"""

from __future__ import annotations

from typing import Any

from bireme.engines.trtllm.request_state import RequestState
from bireme.errors import KvTransferError, from_message
from bireme.messages import Finish, Usage
from bireme.metrics import Registry


class TrtllmMetrics:
    """Used from the event loop's thread."""

    def __init__(self, metrics: Registry, worker: str, tokens_per_block: int) -> None:
        self._metrics = metrics
        self._worker = worker
        self._tokens_per_block = tokens_per_block
        self._unread = Registry()  # of canaries
        metrics.start("bireme_cancellations_total")

    def _metrics_of(self, state: RequestState) -> Registry:
        return self._unread if state.is_canary else self._metrics

    def accepted(self, state: RequestState) -> None:
        metrics = self._metrics_of(state)
        metrics.observe("bireme_prompt_tokens", state.num_prompt)
        metrics.add("bireme_prompt_tokens_total", state.num_prompt)

    def delivered(self, state: RequestState, count: int, is_first: bool) -> None:
        metrics = self._metrics_of(state)
        metrics.add("bireme_generated_tokens_total", count)
        if count and state.gap_s:
            metrics.observe("bireme_inter_token_latency_seconds", state.gap_s)
        if is_first and not state.request.num_resumed:
            metrics.observe("bireme_time_to_first_token_seconds", state.first_token_at - state.arrived_at)

    def finished(self, state: RequestState, finish: Finish, now: float) -> None:
        outcome = finish.error.partition(":")[0] if finish.error else finish.reason
        metrics = self._metrics_of(state)
        self._metrics.count_end(outcome, now - state.arrived_at, state.is_canary)
        if finish.usage.queue_ms:  # unknown without return_perf_metrics
            metrics.observe("bireme_queue_seconds", finish.usage.queue_ms / 1e3)
        metrics.observe("bireme_completion_tokens", state.request.num_resumed + state.num_output)
        metrics.add("bireme_cached_prompt_tokens_total", finish.usage.cached_tokens if state.params is None else 0)
        if finish.reason == "cancelled":
            metrics.add("bireme_cancellations_total")
        if state.params is not None:
            self._count_transfer(state, finish)

    def _count_transfer(self, state: RequestState, finish: Finish) -> None:
        """How many bytes is known with return_perf_metrics alone."""
        metrics = self._metrics_of(state)
        if isinstance(from_message(finish.error), KvTransferError):
            metrics.add("bireme_kv_transfer_failures_total", 1, "unavailable")
        elif state.first_token_at:
            metrics.observe("bireme_kv_transfer_seconds", finish.usage.transfer_ms / 1e3, "import")
            metrics.add("bireme_kv_transfer_bytes_total", transfer_bytes(state), "import")

    def usage(self, state: RequestState, now: float) -> Usage:
        perf = _perf(state.result)
        queue_ms = _between(perf, "arrival_time", "first_scheduled_time")
        first_ms = 1e3 * ((state.first_token_at or now) - state.arrived_at)
        usage = Usage(
            prompt_tokens=state.num_prompt,
            completion_tokens=state.request.num_resumed + state.num_output,
            queue_ms=queue_ms,
            prefill_ms=max(0.0, first_ms - queue_ms),
            decode_ms=1e3 * (now - state.first_token_at) if state.first_token_at else 0.0,
            prefill_worker=self._worker,
            decode_worker="" if state.request.request_type == "context_only" else self._worker,
        )
        speculation = getattr(perf, "speculative_decoding", None)
        usage.drafted_tokens = int(getattr(speculation, "total_draft_tokens", 0) or 0)
        usage.accepted_tokens = int(getattr(speculation, "total_accepted_draft_tokens", 0) or 0)
        if state.params is None:
            usage.cached_tokens = self._cached(state, perf)
        else:  # all of the prompt's KV was transferred: what prefill found cached is what was saved
            usage.cached_tokens = state.params.cached_tokens
            usage.prefill_worker, usage.prefill_ms = state.params.worker, state.params.prefill_ms
            usage.queue_ms += state.params.queue_ms
            usage.transfer_ms = _between(perf, "kv_cache_transfer_start", "kv_cache_transfer_end") or first_ms
        return usage

    def _cached(self, state: RequestState, perf: Any) -> int:
        """Reused prompt tokens; at least one is always computed. Releases before 1.2 tell blocks only."""
        known = getattr(state.result, "cached_tokens", None)
        if not known and (blocks := getattr(getattr(perf, "kv_cache_metrics", None), "num_reused_blocks", 0)):
            known = blocks * self._tokens_per_block
        return min(int(known or 0), max(0, len(state.call.prompt) - 1))


def transfer_bytes(state: RequestState) -> int:
    """Return how much KV came from prefill; 0: it is known with return_perf_metrics alone."""
    return int(getattr(getattr(_perf(state.result), "timing_metrics", None), "kv_cache_size", 0) or 0)


def _perf(result: Any) -> Any:
    outputs = getattr(result, "outputs", None)
    return getattr(outputs[0], "request_perf_metrics", None) if outputs else None


def _between(perf: Any, start: str, end: str) -> float:
    """Timedeltas of a steady clock; 0: unknown."""
    timing = getattr(perf, "timing_metrics", None)
    first, last = getattr(timing, start, None), getattr(timing, end, None)
    if first is None or last is None or not hasattr(first, "total_seconds"):
        return 0.0
    seconds: float = (last - first).total_seconds()
    return max(0.0, 1e3 * seconds)
