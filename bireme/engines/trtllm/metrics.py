"""Accounts: the usage that ends each request, and bireme's own metrics of this engine.

Times are of wall clocks here; with `return_perf_metrics` TensorRT-LLM's own give a request's time in the queue and of
its KV transfer.
"""

from __future__ import annotations

from typing import Any

from bireme.engines.trtllm.run import Run
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

    def _metrics_of(self, run: Run) -> Registry:
        return self._unread if run.is_canary else self._metrics

    def accepted(self, run: Run) -> None:
        metrics = self._metrics_of(run)
        metrics.observe("bireme_prompt_tokens", run.num_prompt)
        metrics.add("bireme_prompt_tokens_total", run.num_prompt)

    def delivered(self, run: Run, count: int, is_first: bool) -> None:
        metrics = self._metrics_of(run)
        metrics.add("bireme_generated_tokens_total", count)
        if count and run.gap_s:
            metrics.observe("bireme_inter_token_latency_seconds", run.gap_s)
        if is_first and not run.request.num_resumed:
            metrics.observe("bireme_time_to_first_token_seconds", run.first_token_at - run.arrived_at)

    def finished(self, run: Run, finish: Finish, now: float) -> None:
        outcome = finish.error.partition(":")[0] if finish.error else finish.reason
        metrics = self._metrics_of(run)
        self._metrics.count_end(outcome, now - run.arrived_at, run.is_canary)
        if finish.usage.queue_ms:  # unknown without return_perf_metrics
            metrics.observe("bireme_queue_seconds", finish.usage.queue_ms / 1e3)
        metrics.observe("bireme_completion_tokens", run.request.num_resumed + run.num_output)
        metrics.add("bireme_cached_prompt_tokens_total", finish.usage.cached_tokens if run.params is None else 0)
        if finish.reason == "cancelled":
            metrics.add("bireme_cancellations_total")
        if run.params is not None:
            self._count_transfer(run, finish)

    def _count_transfer(self, run: Run, finish: Finish) -> None:
        """Count the KV that was moved for a request; how many bytes is known with return_perf_metrics alone."""
        metrics = self._metrics_of(run)
        if isinstance(from_message(finish.error), KvTransferError):
            metrics.add("bireme_kv_transfer_failures_total", 1, "unavailable")
        elif run.first_token_at:
            metrics.observe("bireme_kv_transfer_seconds", finish.usage.transfer_ms / 1e3, "import")
            num_bytes = getattr(getattr(_perf(run.result), "timing_metrics", None), "kv_cache_size", 0)
            metrics.add("bireme_kv_transfer_bytes_total", int(num_bytes or 0), "import")

    def usage(self, run: Run, now: float) -> Usage:
        perf = _perf(run.result)
        queue_ms = _between(perf, "arrival_time", "first_scheduled_time")
        first_ms = 1e3 * ((run.first_token_at or now) - run.arrived_at)
        usage = Usage(
            prompt_tokens=run.num_prompt,
            completion_tokens=run.request.num_resumed + run.num_output,
            queue_ms=queue_ms,
            prefill_ms=max(0.0, first_ms - queue_ms),
            decode_ms=1e3 * (now - run.first_token_at) if run.first_token_at else 0.0,
            prefill_worker=self._worker,
            decode_worker="" if run.request.request_type == "context_only" else self._worker,
        )
        speculation = getattr(perf, "speculative_decoding", None)
        usage.drafted_tokens = int(getattr(speculation, "total_draft_tokens", 0) or 0)
        usage.accepted_tokens = int(getattr(speculation, "total_accepted_draft_tokens", 0) or 0)
        if run.params is None:
            usage.cached_tokens = self._cached(run, perf)
        else:  # all of the prompt's KV was transferred: what prefill found cached is what was saved
            usage.cached_tokens = run.params.cached_tokens
            usage.prefill_worker, usage.prefill_ms = run.params.worker, run.params.prefill_ms
            usage.queue_ms += run.params.queue_ms
            usage.transfer_ms = _between(perf, "kv_cache_transfer_start", "kv_cache_transfer_end") or first_ms
        return usage

    def _cached(self, run: Run, perf: Any) -> int:
        """Reused prompt tokens; at least one is always computed. Releases before 1.2 tell blocks only."""
        known = getattr(run.result, "cached_tokens", None)
        if not known and (blocks := getattr(getattr(perf, "kv_cache_metrics", None), "num_reused_blocks", 0)):
            known = blocks * self._tokens_per_block
        return min(int(known or 0), max(0, len(run.call.prompt) - 1))


def _perf(result: Any) -> Any:
    outputs = getattr(result, "outputs", None)
    return getattr(outputs[0], "request_perf_metrics", None) if outputs else None


def _between(perf: Any, start: str, end: str) -> float:
    """Return milliseconds between two of TensorRT-LLM's times, which are timedeltas of a steady clock; 0: unknown."""
    timing = getattr(perf, "timing_metrics", None)
    first, last = getattr(timing, start, None), getattr(timing, end, None)
    if first is None or last is None or not hasattr(first, "total_seconds"):
        return 0.0
    seconds: float = (last - first).total_seconds()
    return max(0.0, 1e3 * seconds)
