"""The requests in TensorRT-LLM: begun, followed, aborted and ended, on the event loop's thread.

Their output is gathered while the loop runs the tasks of one turn and emitted at once; beside its plain tokens a
request has at most one entry.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from bireme.disagg import DisaggregatedParams
from bireme.engines.base import Emit, EngineContext, PlainTokens, RequestKey, StepOutput
from bireme.engines.trtllm import disaggregation
from bireme.engines.trtllm.faults import FaultWatch
from bireme.engines.trtllm.loading import Loaded
from bireme.engines.trtllm.logprobs import token_logprobs
from bireme.engines.trtllm.metrics import TrtllmMetrics, transfer_bytes
from bireme.engines.trtllm.request_state import GenerateArguments, RequestState
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    EngineLostError,
    KvTransferError,
    RequestError,
    to_message,
)
from bireme.guides import KINDS
from bireme.messages import Finish, FinishReason

logger = logging.getLogger("bireme.engines.trtllm")

_DEFERRED_GRACE_S = 30.0  # beyond the transfer's own time limit; then a deferred abort is carried out after all
_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "timeout": "timeout",
    "cancelled": "cancelled",
    "not_finished": "not_finished",
}


class Requests:
    def __init__(
        self,
        context: EngineContext,
        loaded: Loaded,
        loop: asyncio.AbstractEventLoop,
        emit: Emit,
        fail: Callable[[str], None],
    ) -> None:
        self._context = context
        self._loaded = loaded
        self._loop = loop
        self._emit = emit
        self._fail = fail
        self._accounts = TrtllmMetrics(context.metrics, context.worker, loaded.arguments.tokens_per_block)
        self._faults = FaultWatch(self.warm_up, loop, fail)
        self._states: dict[RequestKey, RequestState] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outputs: dict[RequestKey, StepOutput] = {}
        self._plain = PlainTokens([], [])  # before the outputs of the same request
        self.num_submitted = 0  # by the callers of `begin`
        self.num_submitted_tokens = 0  # to compute
        self.num_ended = 0
        self.num_steps = 0
        self._num_answered = 0  # of those that are open
        self._num_past_tokens = 0  # of those that have been answered, or have ended

    @property
    def num_open(self) -> int:
        """Submitted and not ended; read from any thread."""
        return self.num_submitted - self.num_ended

    @property
    def num_unanswered(self) -> int:
        return self.num_open - self._num_answered

    @property
    def num_unanswered_tokens(self) -> int:
        """Prompt tokens of requests without a first token: the least that is known of what is still to be computed."""
        return self.num_submitted_tokens - self._num_past_tokens

    async def warm_up(self) -> None:
        """The first one starts the engine's loop, later ones show that it still runs."""
        loaded = self._loaded
        sampling = loaded.api.sampling_params(max_tokens=1, end_id=-1, ignore_eos=True, detokenize=False)
        call = GenerateArguments([1], sampling, streaming=False, more={"cache_salt": "bireme warm-up"})
        if loaded.pictures is not None:
            loaded.pictures.complete(call)
        await self._generate(call)

    def begin(self, state: RequestState) -> None:
        """TensorRT-LLM checks it at once."""
        self._states[state.key] = state
        self._accounts.accepted(state)
        if self._is_over_already(state):
            return
        self._set_timers(state)
        if state.pictures is not None and state.pictures.is_to_be_computed:
            assert self._loaded.pictures is not None, "the planner takes no pictures without it"
            self._loaded.pictures.fetch(state, self._pictured)
        else:
            self._submit(state)

    def _pictured(self, state: RequestState, error: BiremeError | None) -> None:
        """The embeddings of its pictures are there, or will not come."""
        if state.key not in self._states:
            return
        if error is not None:
            self._end(state, "error", error)
        else:
            self._submit(state)

    def _submit(self, state: RequestState) -> None:
        try:
            if self._loaded.pictures is not None:
                self._loaded.pictures.complete(state.call, state.pictures)
            if state.call.more.get("cache_salt") or state.request.options.lora_name:
                self._loaded.iterations.request_begins(state.call.prompt, state.spans)
            state.result = self._generate(state.call)
            if self._loaded.pictures is not None:
                self._loaded.pictures.check_made(state)
        except (ValueError, TypeError, AssertionError, NotImplementedError, self._loaded.api.request_error) as error:
            self._end(state, "error", RequestError(f"TensorRT-LLM refuses this request: {error}"))
            return
        except BiremeError as error:
            if state.result is not None:
                state.result.abort()
            self._end(state, "error", error)
            return
        except Exception as error:
            self._break(error)
            return
        task = self._loop.create_task(self._follow(state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _generate(self, call: GenerateArguments) -> Any:
        inputs = call.prompt if call.inputs is None else call.inputs
        return self._loaded.llm.generate_async(inputs, call.sampling, streaming=call.streaming, **call.more)

    def _is_over_already(self, state: RequestState) -> bool:
        """A transferred request whose first token is its last needs no KV; a resumed one may have all its tokens."""
        params = state.params
        if params is None or not params.first_gen_tokens:
            return False
        token, max_tokens = params.first_gen_tokens[0], state.request.sampling.max_tokens or 0
        if token in state.stop_ids:
            self._end(state, "stop", stop_token_id=token)
            return True
        if state.request.num_resumed + 1 >= max_tokens:
            self._deliver_first(state, token)
            self._end(state, "length")
            return True
        return False

    def _deliver_first(self, state: RequestState, token: int) -> None:
        assert state.params is not None
        state.first_token_at = state.last_token_at = time.monotonic()
        state.num_output = 1
        delta = StepOutput(state.key, [token])
        if state.request.sampling.logprobs is not None:
            delta.logprobs = [state.carried(token)]
        self._accounts.delivered(state, 1, is_first=True)
        self._gather(delta)

    def _set_timers(self, state: RequestState) -> None:
        request, scheduler = state.request, self._context.config.scheduler_config
        if request.timeout_ms:
            text = f"timeout_ms: {request.timeout_ms} ms have passed"
            state.timers.append(self._loop.call_later(request.timeout_ms / 1e3, self._expire, state, text, False))
        if limit_s := scheduler.max_queue_time_s:
            text = f"queue time: no token after {limit_s:g} s (scheduler_config.max_queue_time_s); try again later"
            state.timers.append(self._loop.call_later(limit_s, self._expire, state, text, True))

    async def _follow(self, state: RequestState) -> None:
        """An iteration that raises is the engine's death, unless the error is known to be local."""
        try:
            async for result in state.result:
                self._take(state, result)
        except asyncio.CancelledError:
            raise
        except self._loaded.api.request_error as error:
            if state.ending is None:
                self._faults.request_failed(str(error))
            self._end(state, *self._failure(state, error))
        except (AssertionError, ValueError) as error:  # of the result object, here: the engine knows nothing of it
            logger.exception("result_failed request=%s", state.key)
            state.result.abort()
            self._end(state, *self._failure(state, error))
        except Exception as error:
            self._break(error)
        else:
            if state.key in self._states:
                self._end(state, "error", BiremeError("TensorRT-LLM ended this request without saying why"))

    def _take(self, state: RequestState, result: Any) -> None:
        """A request has one output."""
        if not result.outputs:
            result.abort()
            self._end(state, "error", BiremeError("TensorRT-LLM answered without an output"))
            return
        output, now = result.outputs[0], time.monotonic()
        is_first = not state.first_token_at
        delta = state.read(output, now)
        self._faults.request_answered()
        if not state.has_answered:
            self._num_answered += 1
            self._num_past_tokens += state.num_to_compute
            self._let_go_of_pictures(state)
        state.has_answered = True
        if state.ending is not None:
            self._abort_deferred(state)
        elif delta.tokens or delta.prompt_logprobs is not None:
            self._accounts.delivered(state, len(delta.tokens), is_first)
            self._gather(delta)
        if output.finish_reason is not None:
            self._finish(state, output)

    def _finish(self, state: RequestState, output: Any) -> None:
        if state.ending is not None:
            self._end(state, *state.ending)
            return
        reason = _REASONS.get(output.finish_reason)
        if reason is None:
            self._end(state, "error", BiremeError(f"TensorRT-LLM: unknown finish reason {output.finish_reason!r}"))
        elif reason == "timeout":
            self._end(state, "timeout", DeadlineExceededError("TensorRT-LLM's own time limit has passed"))
        elif state.request.request_type == "context_only" and reason != "cancelled":
            self._hand_over(state, output, reason)
        else:
            self._end(state, reason, stop_token_id=state.stop_token(output) if reason == "stop" else None)

    def _hand_over(self, state: RequestState, output: Any, reason: FinishReason) -> None:
        """End a prefill with what decode needs. One that ended by itself has exported nothing."""
        given, now = output.disaggregated_params, time.monotonic()
        must_export = state.kind == "context_only"
        fields = disaggregation.export(given, self._loaded.api) if must_export and given is not None else {}
        token = _first_token(state, output, reason, fields)
        if token is None or (must_export and not fields and reason != "stop"):
            self._end(state, "error", BiremeError("TensorRT-LLM exported no KV of this prefill; see its log"))
            return
        exported = self._exported(state, _with_first(fields, token, output), now)
        if reason == "stop":
            self._end(state, reason, stop_token_id=token, exported=exported)
        else:
            self._end(state, "not_finished" if must_export and reason == "length" else reason, exported=exported)

    def _exported(self, state: RequestState, fields: dict[str, Any], now: float) -> DisaggregatedParams:
        usage = self._accounts.usage(state, now)
        return DisaggregatedParams(
            worker=self._context.worker,
            life=self._context.life,
            lease_id=self._loaded.leases(),
            generation=0,
            num_tokens=len(state.call.prompt),
            prefill_ms=usage.prefill_ms,
            queue_ms=usage.queue_ms,
            cached_tokens=usage.cached_tokens,
            expires_at=time.time() + self._loaded.arguments.transfer_timeout_ms / 1e3,
            **fields,
        )

    def abort(self, key: RequestKey) -> None:
        """End a request; unknown keys are ignored. KV that was exported is freed by its own time limit."""
        if (state := self._states.get(key)) is not None:
            self._stop(state, "cancelled", "")

    async def end_all(self, limit_s: float) -> None:
        """Wait a little for the ends; the rest is told that the worker stopped."""
        for state in list(self._states.values()):
            self._stop(state, "error", to_message(EngineLostError(f"{self._context.worker} has stopped")))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        for state in list(self._states.values()):
            self._end(state, *(state.ending or ("cancelled", "")))
        self._flush()

    def _expire(self, state: RequestState, text: str, is_of_queue: bool) -> None:
        if state.key in self._states and not (is_of_queue and state.has_answered):
            self._stop(state, "timeout", to_message(DeadlineExceededError(text)))

    def _stop(self, state: RequestState, reason: FinishReason, error: str) -> None:
        """The request ends when TensorRT-LLM says that it has."""
        if state.ending is not None:
            return
        state.ending = (reason, error)
        if state.result is None:  # its pictures are still to come
            self._end(state, reason, error)
            return
        if not state.must_defer_abort:
            state.result.abort()
            return
        limit_s = self._loaded.arguments.transfer_timeout_ms / 1e3 + _DEFERRED_GRACE_S
        state.timers.append(self._loop.call_later(limit_s, state.result.abort))

    def _abort_deferred(self, state: RequestState) -> None:
        if not state.result.aborted() and state.result.outputs[0].finish_reason is None:
            state.result.abort()

    def _failure(self, state: RequestState, error: Exception) -> tuple[FinishReason, BiremeError | str]:
        if state.ending is not None:
            return state.ending
        if state.kind == "generation_only" and not state.has_answered:
            return "error", KvTransferError(f"KV of the prefill did not arrive: {error}")
        guide = state.request.sampling.guided_decoding
        if guide is not None and not state.has_answered:  # it is compiled with its first step
            kind = next(name for name in guide if name in KINDS)
            return "error", RequestError(f"guided_decoding.{kind}: TensorRT-LLM refuses it: {str(error)[:300]}")
        return "error", BiremeError(f"TensorRT-LLM: {error}")

    def _end(
        self,
        state: RequestState,
        reason: FinishReason,
        error: BiremeError | str = "",
        *,
        stop_token_id: int | None = None,
        exported: DisaggregatedParams | None = None,
    ) -> None:
        if self._states.pop(state.key, None) is None:
            return
        for timer in state.timers:
            timer.cancel()
        self._let_go_of_pictures(state)
        now = time.monotonic()
        text = to_message(error) if isinstance(error, BiremeError) else error
        finish = Finish(reason, self._accounts.usage(state, now), text, stop_token_id)
        if state.trace is not None:
            finish.spans = state.told(state.trace, finish.usage, transfer_bytes(state), now)
        self._accounts.finished(state, finish, now)
        self._loaded.iterations.request_ended(state.result)
        self.num_ended += 1
        self._num_answered -= state.has_answered
        self._num_past_tokens += 0 if state.has_answered else state.num_to_compute
        self._gather(StepOutput(state.key, finish=finish, exported=exported))

    def _let_go_of_pictures(self, state: RequestState) -> None:
        if self._loaded.pictures is not None:
            self._loaded.pictures.release(state)

    def _break(self, error: Exception) -> None:
        self._fail(f"{type(error).__name__}: {error}")

    def _gather(self, delta: StepOutput) -> None:
        """Of one turn of the loop, to emit them together."""
        if not (self._outputs or self._plain.keys):
            self._loop.call_soon(self._flush)
        known = self._outputs.get(delta.key)
        if known is not None:
            self._outputs[delta.key] = _joined(known, delta)
        elif delta.is_plain:
            self._plain.keys.append(delta.key)
            self._plain.tokens += delta.tokens
        else:
            self._outputs[delta.key] = delta

    def _flush(self) -> None:
        if not (self._outputs or self._plain.keys):
            return
        outputs, self._outputs, plain, self._plain = self._outputs, {}, self._plain, PlainTokens([], [])
        self.num_steps += 1
        self._emit(self.num_steps, list(outputs.values()), plain)


def _joined(first: StepOutput, second: StepOutput) -> StepOutput:
    return dataclasses.replace(
        second,
        tokens=first.tokens + second.tokens,
        logprobs=_joined_lists(first.logprobs, second.logprobs),
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
    )


def _joined_lists(first: Any, second: Any) -> Any:
    return second if first is None else first + (second or [])


def _with_first(fields: dict[str, Any], token: int, output: Any) -> dict[str, Any]:
    """Where the export had none."""
    fields["first_gen_tokens"] = fields.get("first_gen_tokens") or (token,)
    if not fields.get("first_gen_log_probs") and output.logprobs:
        fields["first_gen_log_probs"] = (token_logprobs(output.logprobs[0], token),)
    return fields


def _first_token(state: RequestState, output: Any, reason: FinishReason, fields: dict[str, Any]) -> int | None:
    """At a stop it may have been taken off."""
    if fields.get("first_gen_tokens"):
        return int(fields["first_gen_tokens"][0])
    if reason == "stop":
        return state.stop_token(output)
    return int(output.token_ids[0]) if output.token_ids else None
