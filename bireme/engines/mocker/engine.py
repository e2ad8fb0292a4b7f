"""The mocker: an engine with a timing model instead of a model, for load tests and capacity planning.

It does what an engine does (continuous batching, token budget, blocks with a prefix cache, bounded queue, deadlines,
aborts, disaggregation with real bytes) without the arithmetic. A step takes `step_ms + step_ms_per_request * decoding +
prefill`, by absolute deadlines, so that the pace does not drift; each decoding request gets one token a step. tokens.py
defines the tokens. Sampling parameters other than lengths, stop ids and logprobs change nothing.
"""

from __future__ import annotations

import bisect
import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from bireme.best_effort import BestEffortShare
from bireme.disagg import DisaggregatedParams
from bireme.engines.base import (
    AdmittedRequest,
    Emit,
    EngineContext,
    EngineProgress,
    PlainTokens,
    RequestKey,
    StepOutput,
)
from bireme.engines.child.step_log import StepLog
from bireme.engines.child.validate import check_open
from bireme.engines.mocker.blocks import BlockContent, Holding, MockBlockPool
from bireme.engines.mocker.metrics import MockMetrics
from bireme.engines.mocker.pace import Pace
from bireme.engines.mocker.rows import LAYOUT, MockKvRows
from bireme.engines.mocker.sequence import MockSequence, MockSequenceStatus
from bireme.engines.mocker.step_records import MockRecorder
from bireme.engines.mocker.tokens import Ids, plain_ids, printable_ids
from bireme.errors import BiremeError, DeadlineExceededError, RequestError, to_message
from bireme.kv.blocks.events import EventBuffer, KvEvent
from bireme.kv.transfer.base import Lease
from bireme.messages import Capacity, Finish, FinishReason
from bireme.request_trace import EngineSpans, PromptWork

logger = logging.getLogger("bireme.engine")
MAX_BATCH_SIZE = 1024
MAX_NUM_TOKENS = 8192
_POOL_TOKENS_PER_REQUEST = 8192  # default size of the pool: this times max_batch_size, or one longest sequence
_INTAKE_S = 0.001
_POLL_S = 0.05  # how often deadlines are looked at while nothing can run
_EXPIRE_S = 0.005  # how exact deadlines are


class MockEngine:
    """Driven by the IO thread; everything but the counters under the lock belongs to the engine's thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._model = context.config.mocker
        self._accounts = MockMetrics(context.metrics)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_queued = 0  # submitted, not admitted
        self._num_queued_tokens = 0  # prompt tokens of these
        self._num_prefill_tokens = 0  # of running requests, still to be computed
        self._num_blocks = 0
        self._events: EventBuffer | None = None
        self._num_submitted = 0
        self._is_draining = False
        self._stopping = threading.Event()
        self._waiting: list[MockSequence] = []  # by rank
        self._running: dict[RequestKey, MockSequence] = {}
        self._leases: dict[RequestKey, Lease] = {}  # exported; they hold the blocks of ended requests
        self._outputs: list[tuple[MockSequence, bool, Finish | None]] = []  # first tokens and ends, to be accounted for
        self._chunks: list[tuple[EngineSpans, int]] = []  # of traced requests, in the step under way
        self._prompt_work = PromptWork()
        self._step = 0
        self._began_at = 0.0
        self._stepped_at = 0.0
        self._pace = Pace(self._stopping)
        self._best_effort = BestEffortShare(context.config.scheduler_config.best_effort_share)
        self._expire_at = 0.0
        self._emit: Emit  # from `start` on
        self._step_log = StepLog()
        self._recorder = MockRecorder(context.steps) if context.steps is not None else None
        self._thread = threading.Thread(target=self._run, name="mocker", daemon=True)

    def start(self, emit: Emit) -> Capacity:
        self._emit = emit
        config = self._context.config
        self._ids, vocab_size = self._vocabulary()
        self._max_batch_size = config.max_batch_size or MAX_BATCH_SIZE
        self._max_num_tokens = config.max_num_tokens or MAX_NUM_TOKENS
        self._max_queue_size = config.scheduler_config.max_queue_size
        self._max_queue_time_s = config.scheduler_config.max_queue_time_s or math.inf
        max_seq_len = config.max_seq_len or self._model.max_seq_len
        kv = config.kv_cache_config
        pool_tokens = kv.max_tokens or max(max_seq_len, self._max_batch_size * _POOL_TOKENS_PER_REQUEST)
        self._num_blocks = num_blocks = max(1, pool_tokens // kv.tokens_per_block)
        if kv.event_buffer_max_size and kv.enable_block_reuse:
            self._events = EventBuffer(kv.event_buffer_max_size)
        self._pool = MockBlockPool(num_blocks, kv.tokens_per_block, kv.enable_block_reuse, self._events)
        if self._context.transfer is not None:
            self._context.transfer.start(LAYOUT)
        self._stopping.wait(self._model.load_ms / 1e3)
        self._accounts.levels(self._pool)
        self._thread.start()
        return Capacity(
            max_seq_len=max_seq_len,
            max_batch_size=self._max_batch_size,
            max_num_tokens=self._max_num_tokens,
            max_queue_size=self._max_queue_size,
            tokens_per_block=kv.tokens_per_block,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
            dtype="int32",
        ).within_pool()

    def submit(self, key: RequestKey, admitted: AdmittedRequest) -> None:
        if admitted.request.sampling.guided_decoding is not None:
            raise RequestError("guided_decoding: the mocker does not choose its tokens; leave it out")
        with self._lock:
            check_open(self._context.worker, self._is_draining, self._num_queued, self._max_queue_size)
            self._num_queued += 1
            self._num_submitted += 1
            order = self._num_submitted
        sequence = MockSequence(key, admitted, self._ids, order)
        with self._lock:
            self._num_queued_tokens += sequence.num_to_compute
        self._inbox.put(lambda: self._enqueue(sequence))

    def abort(self, key: RequestKey) -> None:
        self._inbox.put(lambda: self._abort(key))

    def drain(self) -> None:
        with self._lock:
            self._is_draining = True

    def progress(self) -> EngineProgress:
        return EngineProgress(
            self._step,
            self._began_at,
            self._num_queued,
            len(self._running),
            self._num_queued_tokens + self._num_prefill_tokens,
            self._pool.num_used if self._num_blocks else 0,
            self._num_blocks,
        )

    def kv_events(self) -> list[KvEvent]:
        return self._events.drain() if self._events is not None else []

    def stop(self) -> None:
        self._stopping.set()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(1)
        self._step_log.close()

    def _vocabulary(self) -> tuple[Ids, int]:
        if self._model.vocab_size:
            return plain_ids(self._model.vocab_size), self._model.vocab_size
        return printable_ids(self._context.model_path)

    def _run(self) -> None:
        self._pace.sharpen(self._model.step_ms)
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception as error:
                logger.exception("mocker_failed step=%d", self._step)
                self._fail_all(error)

    def _turn(self) -> None:
        self._take_inbox()
        now = time.monotonic()
        self._expire(now)
        decoding, prefilling, wakes_at = self._plan(now)
        if decoding or prefilling:
            self._do_step(decoding, prefilling)
            return
        self._began_at = 0.0
        self._pace.rest()
        self._accounts.levels(self._pool, self._best_effort.num_rests)
        self._wait(wakes_at)

    def _plan(self, now: float) -> tuple[list[MockSequence], list[MockSequence], float]:
        """Admit; return those that decode, those that prefill, and when to plan again if there are none."""
        share, running, waiting = self._best_effort, self._running, self._waiting
        self._admit(is_best_effort=False)
        decoding, prefilling, own = self._active()
        has_others = len(own) < len(running) or bool(waiting and not waiting[0].is_best_effort)
        share.plan(now, has_others)
        if not own and not (waiting and waiting[-1].is_best_effort):
            return decoding, prefilling, math.inf
        return self._plan_best_effort(now, decoding, prefilling)

    def _plan_best_effort(
        self, now: float, decoding: list[MockSequence], prefilling: list[MockSequence]
    ) -> tuple[list[MockSequence], list[MockSequence], float]:
        """Add best-effort ones to the others, where they may run now."""
        share = self._best_effort
        if not share.may_run(now, has_prompt=bool(prefilling)):
            share.num_rests += bool(decoding or prefilling)
            return decoding, prefilling, share.wakes_at
        self._admit(is_best_effort=True)
        _, _, own = self._active()
        own_decoding = [one for one in own if one.state is MockSequenceStatus.DECODE]
        own_prefilling = [one for one in own if one.state is MockSequenceStatus.PREFILL]
        if own_decoding or own_prefilling:
            share.ran(now)
        return decoding + own_decoding, prefilling + own_prefilling, math.inf

    def _active(self) -> tuple[list[MockSequence], list[MockSequence], list[MockSequence]]:
        """Best-effort ones are apart, in the last list."""
        decode, prefill = MockSequenceStatus.DECODE, MockSequenceStatus.PREFILL
        decoding: list[MockSequence] = []
        prefilling: list[MockSequence] = []
        best_effort: list[MockSequence] = []
        for one in self._running.values():
            if one.is_best_effort:
                best_effort.append(one)
            elif one.state is decode:
                decoding.append(one)
            elif one.state is prefill:
                prefilling.append(one)
        return decoding, prefilling, best_effort

    def _take_inbox(self) -> None:
        """Take the inbox; a burst in portions, so that it does not stretch the current step."""
        until = time.monotonic() + _INTAKE_S
        while not self._inbox.empty() and time.monotonic() < until:
            if (action := self._inbox.get()) is not None:
                action()

    def _wait(self, wakes_at: float) -> None:
        """While there are requests, no longer than until deadlines are looked at."""
        longest_s = max(0.0, min(_POLL_S, wakes_at - time.monotonic()))
        try:
            action = self._inbox.get(timeout=longest_s if self._waiting or self._running else None)
        except queue.Empty:
            return
        if action is not None:
            action()

    def _enqueue(self, sequence: MockSequence) -> None:
        options = sequence.request.options
        sequence.content = self._pool.content(sequence.request.prompt, options.lora_name, options.cache_salt)
        bisect.insort(self._waiting, sequence, key=lambda one: one.rank)
        if self._recorder is not None:
            self._recorder.queued(sequence)

    def _leave_queue(self, sequence: MockSequence) -> None:
        with self._lock:
            self._num_queued -= 1
            self._num_queued_tokens -= sequence.num_to_compute
        if self._recorder is not None:
            self._recorder.left_queue(sequence)

    def _abort(self, key: RequestKey) -> None:
        sequence = self._running.get(key) or next((one for one in self._waiting if one.key == key), None)
        if sequence is None:
            if (lease := self._leases.get(key)) is not None:
                lease.abort()
            return
        if sequence.state is MockSequenceStatus.FETCHING and sequence.fetch is not None:
            sequence.is_aborted = True
            sequence.fetch.cancel()  # the end comes with its `done`
            return
        self._remove_waiting(sequence)
        self._end(sequence, "cancelled")

    def _remove_waiting(self, sequence: MockSequence) -> None:
        if sequence.state is MockSequenceStatus.WAITING:
            self._waiting.remove(sequence)
            self._leave_queue(sequence)

    def _expire(self, now: float) -> None:
        if now < self._expire_at:
            return
        self._expire_at = now + _EXPIRE_S
        limit = self._max_queue_time_s
        for one in [one for one in self._waiting if now - one.arrived_at > limit]:
            self._remove_waiting(one)
            text = f"queue time: {now - one.arrived_at:.1f} s; scheduler_config.max_queue_time_s is {limit:g}"
            self._end(one, "timeout", DeadlineExceededError(text))
        late = [one for one in (*self._waiting, *self._running.values()) if now > one.deadline]
        for one in late:
            if one.state is MockSequenceStatus.FETCHING and one.fetch is not None:
                one.fetch.cancel()
                continue
            self._remove_waiting(one)
            text = f"timeout_ms: {one.request.timeout_ms} have passed after {one.num_generated} tokens"
            self._end(one, "timeout", DeadlineExceededError(text))

    def _admit(self, is_best_effort: bool) -> None:
        """The first that does not fit stops the queue; one that can share a beginning under way is passed by."""
        at = 0
        while at < len(self._waiting) and len(self._running) < self._max_batch_size:
            one = self._waiting[at]
            if one.is_best_effort is not is_best_effort:
                return  # others come first
            # At least one prompt token is computed, so that there are logits to sample from.
            max_hits = (one.num_prompt - 1) // self._pool.tokens_per_block
            assert one.content is not None
            if one.params is None and self._is_computing(one, one.content, max_hits):
                at += 1
                continue
            holding = self._pool.allocate(one.content.keys, one.num_total, max_hits)
            if holding is None:
                return
            self._waiting.pop(at)
            self._leave_queue(one)
            self._running[one.key] = one
            try:
                self._begin(one, holding)
            except BiremeError as error:
                self._end(one, "error", error)

    def _is_computing(self, one: MockSequence, content: BlockContent, max_hits: int) -> bool:
        """Return whether it should wait for blocks that another computes; for one that may rest only its like do."""
        return self._pool.is_computing(content.keys, max_hits) and (
            one.is_best_effort
            or not any(
                other.is_best_effort and other.state is MockSequenceStatus.PREFILL for other in self._running.values()
            )
        )

    def _begin(self, one: MockSequence, holding: Holding) -> None:
        one.holding = holding
        one.admitted_at = time.monotonic()
        held = holding.num_shared * self._pool.tokens_per_block
        one.num_cached = 0 if one.params else held
        self._accounts.admitted(one)
        if one.params is not None:
            self._fetch(one, one.params, held)
            return
        one.state = MockSequenceStatus.PREFILL
        one.prefill_left = one.num_prompt - held
        assert one.content is not None
        self._pool.begin(holding, one.content)
        self._num_prefill_tokens += one.prefill_left
        if one.request.request_type == "context_only":
            assert self._context.transfer is not None, "the gate lets no context_only through without a transfer"
            one.lease = self._context.transfer.reserve(lambda: self._inbox.put(lambda: self._unlease(one.key, holding)))
            one.lease.is_canary = one.is_canary

    def _unlease(self, key: RequestKey, holding: Holding) -> None:
        self._leases.pop(key, None)
        self._pool.free(holding)

    def _fetch(self, one: MockSequence, params: DisaggregatedParams, held: int) -> None:
        assert self._context.transfer is not None, "the gate lets no generation_only through without a transfer"
        one.state = MockSequenceStatus.FETCHING
        one.rows, one.first_row = MockKvRows.empty(one.prompt_ids), held
        first = params.first_gen_tokens
        if first and (first[0] in one.stop_ids or one.num_generated + len(first) >= one.max_tokens):
            one.state, one.decode_at = MockSequenceStatus.DECODE, time.monotonic()
            self._hand_out([self._deliver(one, list(first))])  # its first token was the last: no KV is needed
            return

        def done(error: BiremeError | None) -> None:
            self._inbox.put(lambda: self._fetched(one, error))

        one.fetch = self._context.transfer.fetch(params, (held,), one.rows.rows, done)
        if first:
            self._hand_out([self._deliver(one, list(first))])  # the client need not wait for the rows

    def _fetched(self, one: MockSequence, error: BiremeError | None) -> None:
        if one.state is not MockSequenceStatus.FETCHING:
            return
        if one.is_aborted:
            self._end(one, "cancelled")
        elif time.monotonic() > one.deadline:
            text = f"timeout_ms: {one.request.timeout_ms} have passed while KV was on the way"
            self._end(one, "timeout", DeadlineExceededError(text))
        elif error is not None:
            self._end(one, "error", error)
        elif one.rows is not None and (text := one.rows.corruption(one.first_row)):
            self._end(one, "error", BiremeError(text))
        else:
            self._begin_decode(one)

    def _begin_decode(self, one: MockSequence) -> None:
        one.state = MockSequenceStatus.DECODE
        one.decode_at = time.monotonic()
        if one.spans is not None:
            one.spans.begin_generation(self._prompt_work)
        assert one.holding is not None and one.content is not None
        self._pool.publish(one.holding, one.content)

    def _do_step(self, decoding: list[MockSequence], prefilling: list[MockSequence]) -> None:
        began, is_first = time.monotonic(), self._pace.is_idle
        self._began_at = began
        if self._recorder is not None:
            self._recorder.begin(decoding, prefilling)
        num_left = self._num_prefill_tokens
        prefill_s, prefilled = self._prefill(prefilling, self._max_num_tokens - len(decoding))
        plain, others = _advance(decoding)  # tokens are made within the step, as a GPU would
        others += prefilled
        tokens = [one.next_token() for one in others]
        model = self._model
        duration_s = (model.step_ms + model.step_ms_per_request * len(decoding)) / 1e3 + prefill_s
        self._pace.step(began, duration_s)
        if prefilling:
            self._note_prompts(began, num_left - self._num_prefill_tokens)
        for one in prefilled:
            self._begin_decode(one)
        deltas = [self._deliver(one, [token]) for one, token in zip(others, tokens, strict=True)]
        self._step += 1
        self._began_at = 0.0
        ended = time.monotonic()
        self._hand_out(deltas, plain)
        num_load = len(deltas) + len(plain.keys)
        if self._accounts.has_canaries:  # of theirs only the first tokens and the last
            num_load -= sum(one.is_canary for one in others)
        self._accounts.gaps(decoding, self._stepped_at, ended)
        if self._recorder is not None:
            self._recorder.stepped(ended - (began if is_first else self._stepped_at))
        self._stepped_at = ended
        self._accounts.levels(self._pool, self._best_effort.num_rests)
        self._accounts.stepped(ended - began, num_load)
        self._step_log.add(began, ended, is_first)

    def _note_prompts(self, began: float, num_tokens: int) -> None:
        now = time.monotonic()
        self._prompt_work.note(now - began, num_tokens)
        for spans, chunk in self._chunks:
            spans.add("prefill_chunk", began, now, tokens=chunk, step=self._step)

    def _prefill(self, prefilling: list[MockSequence], budget: int) -> tuple[float, list[MockSequence]]:
        """Within the token budget; return the time it takes and those that are complete."""
        seconds, complete = 0.0, []
        self._chunks.clear()
        best_effort = self._best_effort.most_prompt_tokens(self._began_at, self._max_num_tokens)
        for one in prefilling:
            room = min(budget, best_effort) if one.is_best_effort else budget
            if room <= 0:
                break
            if one.prefill_left == one.num_prompt - one.num_cached:
                seconds += self._model.prefill_ms / 1e3
            chunk = min(one.prefill_left, room)
            budget -= chunk
            best_effort -= chunk * one.is_best_effort
            one.prefill_left -= chunk
            if one.spans is not None:
                self._chunks.append((one.spans, chunk))
            self._num_prefill_tokens -= chunk
            seconds += chunk * self._model.prefill_ms_per_token / 1e3
            if not one.prefill_left:
                complete.append(one)
        return seconds, complete

    def _deliver(self, one: MockSequence, tokens: list[int]) -> StepOutput:
        is_first = one.num_generated == one.request.num_resumed
        delta = StepOutput(one.key)
        for token in tokens:
            if token in one.stop_ids and one.num_generated >= one.min_tokens:
                delta.finish = self._finish(one, "stop", stop_token_id=token)
                break
            delta.tokens.append(token)
            one.num_generated += 1
            if one.num_generated >= one.max_tokens:
                delta.finish = self._finish(one, "length")
                break
        delta.logprobs = one.logprobs(delta.tokens)
        if is_first:
            one.first_token_at = time.monotonic()
            delta.prompt_logprobs = one.prompt_logprobs()
        if one.request.request_type == "context_only":
            self._export(one, delta)
        if is_first or delta.finish is not None:
            self._outputs.append((one, is_first, delta.finish))
        return delta

    def _hand_out(self, deltas: list[StepOutput], plain: PlainTokens | None = None) -> None:
        """Emit the deltas; the accounts come after it, when no client waits."""
        self._emit(self._step, deltas, plain)
        outputs, self._outputs = self._outputs, []
        for one, is_first, finish in outputs:
            if is_first:
                self._accounts.delivered(one)
            if finish is not None:
                self._accounts.finished(one, finish)
                self._release(one)

    def _export(self, one: MockSequence, delta: StepOutput) -> None:
        """Its rows stay until the lease ends. Where its one token is the last, none is exported."""
        assert one.lease is not None
        usage = one.usage(self._context.worker)
        first = tuple(delta.tokens)
        if delta.finish is not None and delta.finish.stop_token_id is not None:
            first = (delta.finish.stop_token_id,)
        delta.exported = DisaggregatedParams(
            worker=self._context.worker,
            life=self._context.life,
            lease_id=one.lease.lease_id,
            generation=one.lease.generation,
            num_tokens=one.num_prompt,
            first_gen_tokens=first,
            is_canary=one.is_canary,
            first_gen_log_probs=tuple(delta.logprobs) if delta.logprobs else None,
            prefill_ms=usage.prefill_ms,
            queue_ms=usage.queue_ms,
            cached_tokens=usage.cached_tokens,
        )
        if delta.finish is None:
            delta.finish = Finish("not_finished", usage)
            if one.spans is not None:
                delta.finish.spans = one.told(one.spans, self._prompt_work)
            self._leases[one.key] = one.lease
            one.lease.export(one.num_prompt, MockKvRows.computed(one.prompt_ids).rows)
            one.lease = one.holding = None

    def _finish(
        self, one: MockSequence, reason: FinishReason, error: str = "", stop_token_id: int | None = None
    ) -> Finish:
        finish = Finish(reason, one.usage(self._context.worker), error, stop_token_id)
        if one.spans is not None:
            finish.spans = one.told(one.spans, self._prompt_work)
        return finish

    def _end(self, one: MockSequence, reason: FinishReason, error: BaseException | None = None) -> None:
        finish = self._finish(one, reason, to_message(error) if error else "")
        self._accounts.finished(one, finish)
        self._release(one)
        self._emit(self._step, [StepOutput(one.key, finish=finish)])

    def _release(self, one: MockSequence) -> None:
        """Its leased blocks are freed with the lease."""
        self._offer_answer(one)
        one.state = MockSequenceStatus.ENDED
        self._running.pop(one.key, None)
        self._num_prefill_tokens -= one.prefill_left
        one.prefill_left = 0
        if one.lease is not None:
            one.lease.abort()
            one.lease = one.holding = None
        if one.holding is not None:
            self._pool.free(one.holding)
            one.holding = None

    def _offer_answer(self, one: MockSequence) -> None:
        """A conversation's next prompt goes on from them."""
        size = self._pool.tokens_per_block
        num_computed = one.num_prompt - one.request.num_resumed + one.num_generated - 1
        if one.state is not MockSequenceStatus.DECODE or one.holding is None or one.content is None:
            return
        has_prompt = one.holding.num_shared == len(one.content.keys)  # else no KV was needed
        if has_prompt and self._pool.is_reusing and num_computed // size > len(one.content.keys):
            options, tokens = one.request.options, one.computed_tokens()
            content = self._pool.content(tokens, options.lora_name, options.cache_salt, one.content)
            self._pool.publish(one.holding, content)

    def _fail_all(self, error: Exception) -> None:
        self._outputs.clear()
        for one in [*self._waiting, *self._running.values()]:
            if one.state is not MockSequenceStatus.ENDED:
                self._remove_waiting(one)
                self._end(one, "error", error)


def _advance(decoding: list[MockSequence]) -> tuple[PlainTokens, list[MockSequence]]:
    """Return the tokens without other output, and the sequences with more."""
    keys: list[RequestKey] = []
    tokens: list[int] = []
    others: list[MockSequence] = []
    for one in decoding:
        token = one.plain_token()
        if token is None:
            others.append(one)
        else:
            keys.append(one.key)
            tokens.append(token)
    return PlainTokens(keys, tokens), others
