"""The executor: one thread, one token a running sequence an iteration, results by callback.

Sequences are computed one by one by transformers, so that each token is what transformers would make alone.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tensorrt_llm import _contract, _handoff
from tensorrt_llm._blocks import BlockAccounts
from tensorrt_llm._results import RequestOutput, Response
from tensorrt_llm._sampling import Chooser, Guide, make_compiler
from tensorrt_llm._values import DisaggregatedParams, RequestError

_IDLE_S = 0.02
_STEP_S = float(os.environ.get("TRTLLM_STAND_IN_STEP_MS", "0")) / 1e3
_TRANSFER_S = float(os.environ.get("TRTLLM_STAND_IN_TRANSFER_MS", "0")) / 1e3
_POOL_TOKENS = 65536


@dataclass(eq=False)
class Sequence:
    """One request's work."""

    result: RequestOutput
    prompt: list[int]
    params: Any
    streaming: bool
    disaggregated: Any
    salt: str
    priority: float
    arrived_at: float
    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # not sent yet: stream_interval
    pending_logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    cache: Any = None
    chooser: Chooser | None = None
    num_blocks: int = 0
    cached_tokens: int = 0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    transfer_until: float = 0.0
    is_aborted: bool = False
    has_answered: bool = False

    @property
    def kind(self) -> str:
        return (self.disaggregated.request_type if self.disaggregated else None) or "context_and_generation"

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)


class Executor:
    def __init__(self, model: Any, args: Any, config: Any) -> None:
        self._model, self._args, self._config = model, args, config
        kv = args.kv_cache_config
        num_blocks = (kv.max_tokens or _POOL_TOKENS) // kv.tokens_per_block
        window = max(kv.max_attention_window or [args.max_seq_len])
        self.blocks = BlockAccounts(
            num_blocks, kv.tokens_per_block, kv.enable_block_reuse, kv.event_buffer_max_size, window
        )
        self.stats: collections.deque[str] = collections.deque(maxlen=1000)
        self.leaked = 0  # blocks lost because a transfer was aborted under way: what deferring aborts avoids
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._exports: list[tuple[Path, int, float]] = []
        self._lock = threading.Condition()
        self._is_over = False
        self._fatal_error: BaseException | None = None
        self._iteration = 0
        self._num_completed = 0
        self._fault: BaseException | None = None
        self._compiler: Any = None
        self._thread = threading.Thread(target=self._run, name="stand-in-executor", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        with self._lock:
            self._waiting.append(sequence)
            self._lock.notify()

    def abort(self, client_id: int) -> None:
        with self._lock:
            for one in (*self._waiting, *self._running):
                if one.result.id == client_id:
                    one.is_aborted = True
            self._lock.notify()

    def break_down(self, error: BaseException) -> None:
        """For tests: the next iteration fails as an engine does that has lost its GPU."""
        with self._lock:
            self._fault = error
            self._lock.notify()

    def check_health(self) -> bool:
        return self._fatal_error is None and self._thread.is_alive()

    def shutdown(self) -> None:
        with self._lock:
            self._is_over = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        while not self._is_over:
            try:
                self._iterate()
            except BaseException as error:
                self._die(error)
                return

    def _iterate(self) -> None:
        began = time.monotonic()
        with self._lock:
            if not self._waiting and not self._running and self._fault is None:
                self._sweep_exports()
                self._lock.wait(_IDLE_S)
                return
            if self._fault is not None:
                raise self._fault
        self._admit()
        for one in list(self._running):
            self._advance(one)
        self._sweep_exports()
        self._iteration += 1
        if _STEP_S:
            time.sleep(max(0.0, began + _STEP_S - time.monotonic()))
        if self._args.enable_iter_perf_stats:
            self.stats.append(json.dumps(self._stats(began)))

    def _die(self, error: BaseException) -> None:
        self._fatal_error = error
        for one in (*self._waiting, *self._running):
            one.result.put(Response(error=RuntimeError(f"executor died: {error}")))

    def _admit(self) -> None:
        with self._lock:
            for one in [one for one in self._waiting if one.is_aborted]:
                self._waiting.remove(one)
                one.result.put(Response(finish_reason="cancelled"))
            self._waiting.sort(key=lambda one: -one.priority)  # stable: arrival counts among equals
            while self._waiting and len(self._running) < (self._args.max_batch_size or 2048):
                one = self._waiting[0]
                worst = len(one.prompt) + one.params.max_tokens
                if self.blocks.blocks_for(worst) > self.blocks.num_blocks:
                    self._waiting.pop(0)
                    one.result.put(Response(error=RequestError("Max KV cache pool size exceeded")))
                elif self.blocks.fits(worst):
                    self._running.append(self._waiting.pop(0))
                    self._begin(one, worst)
                else:
                    return

    def _begin(self, one: Sequence, worst: int) -> None:
        one.num_blocks = self.blocks.hold(worst)
        one.tokens = list(one.prompt)
        one.scheduled_at = time.monotonic()
        size = self._config.vocab_size
        try:
            guide = self._guide(one.params.guided_decoding, size)
        except Exception as error:  # as the real one: a guide's error ends its own request
            self._leave(one)
            one.result.put(Response(error=RequestError(f"Guided decoding error: {error}")))
            return
        one.chooser = Chooser(one.params, one.prompt, size, one.result.id, guide)
        if one.kind == "generation_only":
            one.transfer_until = time.monotonic() + _TRANSFER_S
            one.cached_tokens = len(one.prompt)  # as in the real one: transferred KV counts as cached
        else:
            one.cached_tokens = self.blocks.match(one.prompt, one.salt)

    def _guide(self, params: Any, vocab_size: int) -> Guide | None:
        if params is None:
            return None
        self._compiler = self._compiler or make_compiler(str(self._args.model), vocab_size)
        return Guide(self._compiler, params, vocab_size)

    def _advance(self, one: Sequence) -> None:
        try:
            if one.is_aborted:
                self._cancel(one)
            elif one.kind == "generation_only" and one.cache is None:
                self._receive(one)
            else:
                self._step(one)
        except RequestError as error:
            self._leave(one)
            one.result.put(Response(error=error))

    def _cancel(self, one: Sequence) -> None:
        if one.kind == "generation_only" and not one.has_answered:
            self.leaked += one.num_blocks
            one.num_blocks = 0  # never given back
        self._end(one, "cancelled")

    def _receive(self, one: Sequence) -> None:
        if time.monotonic() < one.transfer_until:
            return
        layers = _handoff.claim(one.disaggregated.opaque_state)
        if layers is None:
            limit = self._args.cache_transceiver_config.kv_transfer_timeout_ms
            if limit is not None and time.monotonic() > one.scheduled_at + limit / 1e3:
                raise RequestError(f"KV transfer timed out after {limit} ms")
            return
        one.cache = _handoff.to_cache(layers)
        assert one.chooser is not None
        for token in one.disaggregated.first_gen_tokens:
            one.chooser.take_over(token)
            carried = getattr(one.disaggregated, "first_gen_log_probs", None)
            self._take(one, token, carried[0] if carried else None)

    def _step(self, one: Sequence) -> None:
        ids = one.prompt if one.cache is None else one.tokens[-1:]
        if one.cache is None:
            one.cache = _handoff.new_cache()
        logits = self._model(input_ids=torch.tensor([ids]), past_key_values=one.cache, use_cache=True).logits[0]
        assert one.chooser is not None
        if len(ids) == len(one.prompt) and one.params.prompt_logprobs is not None and not one.num_output:
            count = one.params.prompt_logprobs  # the likeliest alone, of the token that follows
            one.prompt_logprobs = [one.chooser.logprobs(row.float(), int(row.argmax()), count) for row in logits]
        token, logprobs = one.chooser.choose(logits[-1], one.tokens)
        self._take(one, token, logprobs)

    def _take(self, one: Sequence, token: int, logprobs: Any) -> None:
        one.tokens.append(token)
        one.pending.append(token)
        if logprobs is not None:
            one.pending_logprobs.append(logprobs)
        one.first_token_at = one.first_token_at or time.monotonic()
        params = one.params
        is_end = not params.ignore_eos and token == params.end_id
        if one.kind == "context_only":
            self._hand_over(one, "stop" if is_end else None)
        elif is_end:
            self._end(one, "stop")
        elif token in (params.stop_token_ids or ()):
            self._end(one, "stop", stop_reason=token)
        elif one.num_output >= params.max_tokens:
            self._end(one, "length")
        elif one.streaming and len(one.pending) >= self._args.stream_interval:
            one.result.put(self._response(one))

    def _hand_over(self, one: Sequence, reason: str | None) -> None:
        if reason is not None:
            self._end(one, reason)
            return
        state, path = _handoff.export(one.cache, len(one.prompt))
        limit = self._args.cache_transceiver_config.kv_transfer_timeout_ms
        until = time.monotonic() + (limit / 1e3 if limit is not None else 1e9)
        self._exports.append((path, one.num_blocks, until))
        one.num_blocks = 0  # held by the export
        fields = {
            "request_type": "context_only",
            "first_gen_tokens": one.tokens[len(one.prompt) :],
            "ctx_request_id": one.result.id,
            "opaque_state": state,
        }
        if _contract.IS_1_3:
            fields["disagg_request_id"] = one.disaggregated.disagg_request_id
            if one.pending_logprobs:
                fields["first_gen_log_probs"] = list(one.pending_logprobs)
        one.disaggregated = DisaggregatedParams(**fields)
        self._end(one, "not_finished" if _contract.IS_1_3 else "length", exported=one.disaggregated)

    def _sweep_exports(self) -> None:
        """Give back what a receiver has taken, or nobody has taken in time."""
        kept = []
        for path, count, until in self._exports:
            if path.exists() and time.monotonic() < until:
                kept.append((path, count, until))
                continue
            path.unlink(missing_ok=True)
            self.blocks.release(count)
        self._exports = kept

    def _response(self, one: Sequence) -> Response:
        response = Response(
            token_ids=one.pending,
            logprobs=one.pending_logprobs,
            prompt_logprobs=one.prompt_logprobs,
            cached_tokens=one.cached_tokens,
        )
        one.pending, one.pending_logprobs, one.has_answered = [], [], True
        one.prompt_logprobs = None
        return response

    def _end(self, one: Sequence, reason: str, stop_reason: int | None = None, exported: Any = None) -> None:
        self._leave(one)
        self.blocks.store(one.tokens[:-1] if one.num_output else one.tokens, one.salt)
        response = self._response(one)
        response.finish_reason, response.stop_reason = reason, stop_reason
        response.disaggregated_params = exported
        if one.params.return_perf_metrics or self._args.return_perf_metrics:
            response.perf, response.metrics = self._perf(one, reason)
        one.result.put(response)

    def _leave(self, one: Sequence) -> None:
        self._running.remove(one)
        self.blocks.release(one.num_blocks)
        one.num_blocks = 0
        self._num_completed += 1

    def _perf(self, one: Sequence, reason: str) -> tuple[Any, dict[str, Any]]:
        now = time.monotonic()
        times = {
            "arrival_time": one.arrived_at,
            "first_scheduled_time": one.scheduled_at,
            "first_token_time": one.first_token_at,
            "last_token_time": now,
            "kv_cache_transfer_start": one.scheduled_at,
            "kv_cache_transfer_end": one.first_token_at,
        }
        timing = {name: datetime.timedelta(seconds=value) for name, value in times.items()}
        perf = SimpleNamespace(
            timing_metrics=SimpleNamespace(**timing, kv_cache_size=0),
            kv_cache_metrics=SimpleNamespace(num_reused_blocks=one.cached_tokens // self.blocks.tokens_per_block),
            speculative_decoding=SimpleNamespace(
                acceptance_rate=0.0, total_accepted_draft_tokens=0, total_draft_tokens=0
            ),
        )
        gaps = max(1, one.num_output - 1)
        return perf, {
            "ttft": one.first_token_at - one.arrived_at,
            "e2e": now - one.arrived_at,
            "request_queue_time": one.scheduled_at - one.arrived_at,
            "tpot": (now - one.first_token_at) / gaps,
            "finished_reason": reason,
        }

    def _stats(self, began: float) -> dict[str, Any]:
        blocks = self.blocks
        return {
            "iter": self._iteration,
            "timestamp": datetime.datetime.now().isoformat(),
            "iterLatencyMS": 1e3 * (time.monotonic() - began),
            "numActiveRequests": len(self._running),
            "numQueuedRequests": len(self._waiting),
            "numCompletedRequests": self._num_completed,
            "maxNumActiveRequests": self._args.max_batch_size or 2048,
            "kvCacheStats": {
                "maxNumBlocks": blocks.num_blocks,
                "freeNumBlocks": blocks.num_blocks - blocks.num_used,
                "usedNumBlocks": blocks.num_used,
                "tokensPerBlock": blocks.tokens_per_block,
                "allocTotalBlocks": blocks.allocated,
                "reusedBlocks": blocks.reused,
                "missedBlocks": blocks.missed,
                "cacheHitRate": blocks.reused / max(1, blocks.reused + blocks.missed),
            },
            "inflightBatchingStats": {"numScheduledRequests": len(self._running), "numPausedRequests": 0},
        }
