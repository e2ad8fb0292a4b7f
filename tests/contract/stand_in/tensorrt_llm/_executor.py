"""The executor: one thread, one token a running sequence an iteration, results by callback.

A fault (`break_down`) does what a lost GPU does to the real one: every request that is there or comes gets an error
of its own, and the process lives on; or nobody hears anything any more. What the loop raises outside of a step ends
it: at 1.2.1 requests in flight stay silent, and the next submission raises; from late 1.3 on both get EngineDeadError,
which is no error of a request. Sequences are computed one by one, so that each
token is what transformers would make alone.
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

from tensorrt_llm import _contract, _handoff, _settings
from tensorrt_llm._blocks import BlockAccounts
from tensorrt_llm._pictures import Media
from tensorrt_llm._results import RequestOutput, Response
from tensorrt_llm._sampling import Chooser, Guide, make_compiler
from tensorrt_llm._values import DisaggregatedParams, EngineDeadError, RequestError

_IDLE_S = 0.02
_STEP_S = float(os.environ.get("TRTLLM_STAND_IN_STEP_MS", "0")) / 1e3
_TRANSFER_S = float(os.environ.get("TRTLLM_STAND_IN_TRANSFER_MS", "0")) / 1e3
_POOL_TOKENS = 65536
_ABORT_ITERATIONS = 2  # from the message to its effect
_ERROR_BUDGET = 5  # from 1.3 on: request errors in a row after which the engine calls itself ill


@dataclass(eq=False)
class Sequence:
    """One request's work."""

    result: RequestOutput
    prompt: list[int]
    params: Any
    streaming: bool
    disaggregated: Any
    salt: str
    lora_name: str
    rank: int
    priority: float
    arrived_at: float
    media: Media = field(default_factory=Media)
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
    aborted_at: int | None = None  # the iteration from which on an abort holds
    has_answered: bool = False

    @property
    def kind(self) -> str:
        return (self.disaggregated.request_type if self.disaggregated else None) or "context_and_generation"

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)


class Executor:
    def __init__(self, model: Any, args: Any) -> None:
        config = model.text_config
        self._model, self._args, self._config = model, args, config
        kv = args.kv_cache_config
        num_blocks = (kv.max_tokens or _POOL_TOKENS) // kv.tokens_per_block
        longest = args.max_seq_len or config.max_position_embeddings
        # What the pool can't hold is cut, with a warning in the worker's log; `args` are not told.
        self.max_seq_len = min(longest, num_blocks * kv.tokens_per_block)
        self.num_ranks = args.tensor_parallel_size if args.enable_attention_dp else 1
        window = max(kv.max_attention_window or [longest])
        self.blocks = BlockAccounts(kv, num_blocks, window, self.num_ranks, config.vocab_size)
        self.is_asleep = False
        self.stats: collections.deque[str] = collections.deque(maxlen=1000)
        self.leaked = 0  # blocks lost because a transfer was aborted under way: what deferring aborts avoids
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._exports: list[tuple[Path, int, float]] = []
        self._lock = threading.Condition()
        self._is_over = False
        self._is_dead = False
        self._fatal_error: BaseException | None = None
        self._iteration = 0
        self._num_completed = 0
        self._fault: BaseException | None = None
        self._is_silent = False
        self._num_errors = 0  # in a row
        self._compiler: Any = None
        self._thread = threading.Thread(target=self._run, name="stand-in-executor", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        with self._lock:
            if self._is_dead:
                raise self._death()
            self._waiting.append(sequence)
            self._lock.notify()

    def abort(self, client_id: int) -> None:
        with self._lock:
            for one in (*self._waiting, *self._running):
                if one.result.id == client_id and one.aborted_at is None:
                    one.aborted_at = self._iteration + _ABORT_ITERATIONS
            self._lock.notify()

    def break_down(self, error: BaseException | None) -> None:
        """For tests: from now on every request ends with this error; None: no request ever ends."""
        with self._lock:
            self._fault, self._is_silent = error, error is None
            self._lock.notify()

    def check_health(self) -> bool:
        return self._fatal_error is None and self._thread.is_alive()

    def shutdown(self) -> None:
        with self._lock:
            self._is_over = True
            self._lock.notify()
        self._thread.join()
        for path, *_ in self._exports:  # nobody gets KV of an engine that is gone
            path.unlink(missing_ok=True)

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        while not self._is_over:
            try:
                self._iterate()
            except BaseException as error:  # outside of a step's own care: the worker's end
                self._die(error)
                return

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._fatal_error, self._is_dead = error, True
            for one in (*self._waiting, *self._running) if _contract.FROM_1_3 else ():
                one.result.put(Response(error=self._death()))

    def _death(self) -> RuntimeError:
        kind = EngineDeadError if _contract.FROM_1_3 else RuntimeError
        return kind(f"The executor worker has ended: {self._fatal_error}")

    def _iterate(self) -> None:
        began = time.monotonic()
        with self._lock:
            if self._is_silent or not self._waiting and not self._running:
                self._sweep_exports()
                self._lock.wait(_IDLE_S)
                return
            if self._fault is not None:
                self._answer_all(self._fault)
                return
        self._admit()
        for one in list(self._running):
            self._advance(one)
        self._sweep_exports()
        self._iteration += 1
        if _STEP_S:
            time.sleep(max(0.0, began + _STEP_S - time.monotonic()))
        if self._args.enable_iter_perf_stats:
            self.stats.extend(json.dumps(row) for row in self._rows(began))

    def _answer_all(self, error: BaseException) -> None:
        """A step failed: each of its requests is answered with the reason, and the next step is tried."""
        for one in (*self._waiting, *self._running):
            self._fail(one, RequestError(str(error)))
        self._waiting.clear()

    def _fail(self, one: Sequence, error: RequestError) -> None:
        if one in self._running:
            self._leave(one)
        one.result.put(Response(error=error))
        self._num_errors += 1
        if _contract.FROM_1_3 and self._num_errors >= _ERROR_BUDGET:
            self._fatal_error = RuntimeError(f"{self._num_errors} request errors in a row, the last: {error}")

    def _admit(self) -> None:
        with self._lock:
            for one in [one for one in self._waiting if self._is_aborted(one)]:
                self._waiting.remove(one)
                one.result.put(Response(finish_reason="cancelled"))
            self._waiting.sort(key=lambda one: -one.priority)  # stable: arrival counts among equals
            while self._waiting and len(self._running) < (self._args.max_batch_size or 2048):
                one = self._waiting[0]
                self._check_parts(one)
                # A request that would be longer than a sequence may be is cut; nobody is told.
                room = self.max_seq_len - len(one.prompt)
                one.params.max_tokens = min(one.params.max_tokens, room)
                worst = len(one.prompt) + one.params.max_tokens
                if room <= 0:
                    self._waiting.pop(0)
                    text = f"Prompt length ({len(one.prompt)}) exceeds maximum input length ({self.max_seq_len - 1})"
                    self._fail(one, RequestError(text))
                elif self.blocks.fits(worst):
                    self._running.append(self._waiting.pop(0))
                    self._begin(one, worst)
                else:
                    return

    def _check_parts(self, one: Sequence) -> None:
        """What the request's maker asserts in the worker's loop, beyond its care for single requests."""
        if one.kind == "context_and_generation":
            return
        assert getattr(self._args.cache_transceiver_config, "backend", None), "kv_cache_transceiver is disabled"
        if one.kind == "context_only" and not self._args.disable_overlap_scheduler and not _contract.FROM_1_3:
            raise ValueError("context_only requests need disable_overlap_scheduler")

    def _is_aborted(self, one: Sequence) -> bool:
        return one.aborted_at is not None and self._iteration >= one.aborted_at

    def _begin(self, one: Sequence, worst: int) -> None:
        one.num_blocks = self.blocks.hold(worst)
        one.tokens = list(one.prompt)
        one.scheduled_at = time.monotonic()
        size = self._config.vocab_size
        try:
            one.media.open()
            guide = self._guide(one.params.guided_decoding, size)
        except FileNotFoundError as error:
            self._fail(one, RequestError(f"Failed to open a shared tensor: {error}"))
            return
        except Exception as error:  # as the real one: a guide's error ends its own request
            self._fail(one, RequestError(f"Guided decoding error: {error}"))
            return
        one.chooser = Chooser(one.params, one.prompt, size, one.result.id, self._args, guide)
        if one.kind == "generation_only":
            one.transfer_until = time.monotonic() + _TRANSFER_S
            one.cached_tokens = len(one.prompt)  # as in the real one: transferred KV counts as cached
        else:
            one.cached_tokens = self.blocks.match(one.prompt, one.salt, one.lora_name, one.rank, one.media)

    def _guide(self, params: Any, vocab_size: int) -> Guide | None:
        if params is None:
            return None
        self._compiler = self._compiler or make_compiler(str(self._args.model), vocab_size)
        return Guide(self._compiler, params, vocab_size)

    def _advance(self, one: Sequence) -> None:
        try:
            if self._is_aborted(one):
                self._cancel(one)
            elif one.kind == "generation_only" and one.cache is None:
                self._receive(one)
            else:
                self._step(one)
        except RequestError as error:
            self._fail(one, error)

    def _cancel(self, one: Sequence) -> None:
        if one.kind == "generation_only" and not one.has_answered:
            self.leaked += one.num_blocks
            one.num_blocks = 0  # never given back
        self._end(one, "cancelled")

    def _receive(self, one: Sequence) -> None:
        if time.monotonic() < one.transfer_until:
            return
        layers = _handoff.claim(one.disaggregated)
        if layers is None:
            limit = self._args.cache_transceiver_config.kv_transfer_timeout_ms
            if limit is not None and time.monotonic() > one.scheduled_at + limit / 1e3:
                raise RequestError(f"KV transfer timed out after {limit} ms")
            return
        one.cache = _handoff.fill(self._model.new_cache(), layers)
        assert one.chooser is not None
        for token in one.disaggregated.first_gen_tokens:
            one.chooser.take_over(token)
            carried = getattr(one.disaggregated, "first_gen_log_probs", None)
            self._take(one, token, carried[0] if carried else None)

    def _step(self, one: Sequence) -> None:
        ids = one.prompt if one.cache is None else one.tokens[-1:]
        if one.cache is None:
            one.cache = self._model.new_cache()
        logits = self._model.logits(ids, one.cache, one.media)
        assert one.chooser is not None
        for end in range(self._args.max_num_tokens, len(ids), self._args.max_num_tokens):  # chunks but the last
            one.chooser.process(logits[end - 1].clone(), one.prompt)
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
        }
        if _settings.is_python_transceiver(self._args):
            fields["ctx_info_endpoint"] = f"file://{path}"
        else:
            fields["opaque_state"] = state
        if _contract.FROM_1_3:
            fields["disagg_request_id"] = one.disaggregated.disagg_request_id
            if one.pending_logprobs:
                fields["first_gen_log_probs"] = list(one.pending_logprobs)
        one.disaggregated = DisaggregatedParams(**fields)
        self._end(one, "not_finished" if _contract.FROM_1_3 else "length", exported=one.disaggregated)

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
        tokens = one.tokens[:-1] if one.num_output else one.tokens
        self.blocks.store(tokens, one.salt, one.lora_name, one.rank, one.media)
        self._num_errors = 0
        response = self._response(one)
        response.finish_reason, response.stop_reason = reason, stop_reason
        response.disaggregated_params = exported
        # What the engine's flag means for a request is unclear from 1.3 on (PR 16668): the strict reading.
        if one.params.return_perf_metrics or (self._args.return_perf_metrics and not _contract.FROM_1_3):
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

    def _rows(self, began: float) -> list[dict[str, Any]]:
        """One a rank since late 1.3; before, those of the first rank alone."""
        if not _contract.FROM_1_3 or self.num_ranks == 1:
            return [self._stats(began)]
        return [self._stats(began) | {"attentionDpRank": rank} for rank in range(self.num_ranks)]

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
