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
from bireme.engines.trtllm.metrics import TrtllmMetrics
from bireme.engines.trtllm.run import GenerateArguments, Run
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

WARM_UP_KEY: RequestKey = (0, 0)
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
        self._runs: dict[RequestKey, Run] = {}
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
        """Generate one token of our own: the first starts the engine's loop, later ones show that it still runs."""
        loaded = self._loaded
        sampling = loaded.api.sampling_params(max_tokens=1, end_id=-1, ignore_eos=True, detokenize=False)
        call = GenerateArguments([1], sampling, streaming=False, more={"cache_salt": "bireme warm-up"})
        if loaded.pictures is not None:
            loaded.pictures.complete(call)
        await self._generate(call)

    def begin(self, run: Run) -> None:
        """Hand a planned request to TensorRT-LLM, which checks it at once."""
        self._runs[run.key] = run
        self._accounts.accepted(run)
        if self._is_over_already(run):
            return
        self._set_timers(run)
        if run.pictures is not None and run.pictures.is_to_be_computed:
            assert self._loaded.pictures is not None, "the planner takes no pictures without it"
            self._loaded.pictures.fetch(run, self._pictured)
        else:
            self._submit(run)

    def _pictured(self, run: Run, error: BiremeError | None) -> None:
        """The embeddings of its pictures are there, or will not come."""
        if run.key not in self._runs:
            return
        if error is not None:
            self._end(run, "error", error)
        else:
            self._submit(run)

    def _submit(self, run: Run) -> None:
        try:
            if self._loaded.pictures is not None:
                self._loaded.pictures.complete(run.call, run.pictures)
            if run.call.more.get("cache_salt") or run.request.options.lora_name:
                self._loaded.iterations.request_begins(run.call.prompt, run.spans)
            run.result = self._generate(run.call)
            if self._loaded.pictures is not None:
                self._loaded.pictures.check_made(run)
        except (ValueError, TypeError, AssertionError, NotImplementedError, self._loaded.api.request_error) as error:
            self._end(run, "error", RequestError(f"TensorRT-LLM refuses this request: {error}"))
            return
        except BiremeError as error:
            if run.result is not None:
                run.result.abort()
            self._end(run, "error", error)
            return
        except Exception as error:
            self._break(error)
            return
        task = self._loop.create_task(self._follow(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _generate(self, call: GenerateArguments) -> Any:
        inputs = call.prompt if call.inputs is None else call.inputs
        return self._loaded.llm.generate_async(inputs, call.sampling, streaming=call.streaming, **call.more)

    def _is_over_already(self, run: Run) -> bool:
        """A transferred request whose first token is its last needs no KV; a resumed one may have all its tokens."""
        params = run.params
        if params is None or not params.first_gen_tokens:
            return False
        token, max_tokens = params.first_gen_tokens[0], run.request.sampling.max_tokens or 0
        if token in run.stop_ids:
            self._end(run, "stop", stop_token_id=token)
            return True
        if run.request.num_resumed + 1 >= max_tokens:
            self._deliver_first(run, token)
            self._end(run, "length")
            return True
        return False

    def _deliver_first(self, run: Run, token: int) -> None:
        assert run.params is not None
        run.first_token_at = run.last_token_at = time.monotonic()
        run.num_output = 1
        delta = StepOutput(run.key, [token])
        if run.request.sampling.logprobs is not None:
            delta.logprobs = [run.carried(token)]
        self._accounts.delivered(run, 1, is_first=True)
        self._gather(delta)

    def _set_timers(self, run: Run) -> None:
        request, scheduler = run.request, self._context.config.scheduler_config
        if request.timeout_ms:
            text = f"timeout_ms: {request.timeout_ms} ms have passed"
            run.timers.append(self._loop.call_later(request.timeout_ms / 1e3, self._expire, run, text, False))
        if limit_s := scheduler.max_queue_time_s:
            text = f"queue time: no token after {limit_s:g} s (scheduler_config.max_queue_time_s); try again later"
            run.timers.append(self._loop.call_later(limit_s, self._expire, run, text, True))

    async def _follow(self, run: Run) -> None:
        """Read a request to its end. An iteration that raises is the engine's death, unless the error is known to be
        local.
        """
        try:
            async for result in run.result:
                self._take(run, result)
        except asyncio.CancelledError:
            raise
        except self._loaded.api.request_error as error:
            if run.ending is None:
                self._faults.request_failed(str(error))
            self._end(run, *self._failure(run, error))
        except (AssertionError, ValueError) as error:  # of the result object, here: the engine knows nothing of it
            logger.exception("result_failed request=%s", run.key)
            run.result.abort()
            self._end(run, *self._failure(run, error))
        except Exception as error:
            self._break(error)
        else:
            if run.key in self._runs:
                self._end(run, "error", BiremeError("TensorRT-LLM ended this request without saying why"))

    def _take(self, run: Run, result: Any) -> None:
        """Read the one output that a request has, and end it when it is finished."""
        if not result.outputs:
            result.abort()
            self._end(run, "error", BiremeError("TensorRT-LLM answered without an output"))
            return
        output, now = result.outputs[0], time.monotonic()
        is_first = not run.first_token_at
        delta = run.read(output, now)
        self._faults.request_answered()
        if not run.has_answered:
            self._num_answered += 1
            self._num_past_tokens += run.num_to_compute
            self._let_go_of_pictures(run)
        run.has_answered = True
        if run.ending is not None:
            self._abort_deferred(run)
        elif delta.tokens or delta.prompt_logprobs is not None:
            self._accounts.delivered(run, len(delta.tokens), is_first)
            self._gather(delta)
        if output.finish_reason is not None:
            self._finish(run, output)

    def _finish(self, run: Run, output: Any) -> None:
        if run.ending is not None:
            self._end(run, *run.ending)
            return
        reason = _REASONS.get(output.finish_reason)
        if reason is None:
            self._end(run, "error", BiremeError(f"TensorRT-LLM: unknown finish reason {output.finish_reason!r}"))
        elif reason == "timeout":
            self._end(run, "timeout", DeadlineExceededError("TensorRT-LLM's own time limit has passed"))
        elif run.request.request_type == "context_only" and reason != "cancelled":
            self._hand_over(run, output, reason)
        else:
            self._end(run, reason, stop_token_id=run.stop_token(output) if reason == "stop" else None)

    def _hand_over(self, run: Run, output: Any, reason: FinishReason) -> None:
        """End a prefill with what decode needs. One that ended by itself has exported nothing."""
        given, now = output.disaggregated_params, time.monotonic()
        must_export = run.kind == "context_only"
        fields = disaggregation.export(given, self._loaded.api) if must_export and given is not None else {}
        token = _first_token(run, output, reason, fields)
        if token is None or (must_export and not fields and reason != "stop"):
            self._end(run, "error", BiremeError("TensorRT-LLM exported no KV of this prefill; see its log"))
            return
        exported = self._exported(run, _with_first(fields, token, output), now)
        if reason == "stop":
            self._end(run, reason, stop_token_id=token, exported=exported)
        else:
            self._end(run, "not_finished" if must_export and reason == "length" else reason, exported=exported)

    def _exported(self, run: Run, fields: dict[str, Any], now: float) -> DisaggregatedParams:
        usage = self._accounts.usage(run, now)
        return DisaggregatedParams(
            worker=self._context.worker,
            life=self._context.life,
            lease_id=self._loaded.leases(),
            generation=0,
            num_tokens=len(run.call.prompt),
            prefill_ms=usage.prefill_ms,
            queue_ms=usage.queue_ms,
            cached_tokens=usage.cached_tokens,
            expires_at=time.time() + self._loaded.arguments.transfer_timeout_ms / 1e3,
            **fields,
        )

    def abort(self, key: RequestKey) -> None:
        """End a request; unknown keys are ignored. KV that was exported is freed by its own time limit."""
        if (run := self._runs.get(key)) is not None:
            self._stop(run, "cancelled", "")

    async def end_all(self, limit_s: float) -> None:
        """Abort everything and wait a little for the ends; the rest is told that the worker stopped."""
        for run in list(self._runs.values()):
            self._stop(run, "error", to_message(EngineLostError(f"{self._context.worker} has stopped")))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        for run in list(self._runs.values()):
            self._end(run, *(run.ending or ("cancelled", "")))
        self._flush()

    def _expire(self, run: Run, text: str, is_of_queue: bool) -> None:
        if run.key in self._runs and not (is_of_queue and run.has_answered):
            self._stop(run, "timeout", to_message(DeadlineExceededError(text)))

    def _stop(self, run: Run, reason: FinishReason, error: str) -> None:
        """Abort; the request ends when TensorRT-LLM says that it has."""
        if run.ending is not None:
            return
        run.ending = (reason, error)
        if run.result is None:  # its pictures are still to come
            self._end(run, reason, error)
            return
        if not run.must_defer_abort:
            run.result.abort()
            return
        limit_s = self._loaded.arguments.transfer_timeout_ms / 1e3 + _DEFERRED_GRACE_S
        run.timers.append(self._loop.call_later(limit_s, run.result.abort))

    def _abort_deferred(self, run: Run) -> None:
        if not run.result.aborted() and run.result.outputs[0].finish_reason is None:
            run.result.abort()

    def _failure(self, run: Run, error: Exception) -> tuple[FinishReason, BiremeError | str]:
        if run.ending is not None:
            return run.ending
        if run.kind == "generation_only" and not run.has_answered:
            return "error", KvTransferError(f"KV of the prefill did not arrive: {error}")
        guide = run.request.sampling.guided_decoding
        if guide is not None and not run.has_answered:  # it is compiled with its first step
            kind = next(name for name in guide if name in KINDS)
            return "error", RequestError(f"guided_decoding.{kind}: TensorRT-LLM refuses it: {str(error)[:300]}")
        return "error", BiremeError(f"TensorRT-LLM: {error}")

    def _end(
        self,
        run: Run,
        reason: FinishReason,
        error: BiremeError | str = "",
        *,
        stop_token_id: int | None = None,
        exported: DisaggregatedParams | None = None,
    ) -> None:
        if self._runs.pop(run.key, None) is None:
            return
        for timer in run.timers:
            timer.cancel()
        self._let_go_of_pictures(run)
        now = time.monotonic()
        text = to_message(error) if isinstance(error, BiremeError) else error
        finish = Finish(reason, self._accounts.usage(run, now), text, stop_token_id)
        self._accounts.finished(run, finish, now)
        self._loaded.iterations.request_ended(run.result)
        self.num_ended += 1
        self._num_answered -= run.has_answered
        self._num_past_tokens += 0 if run.has_answered else run.num_to_compute
        self._gather(StepOutput(run.key, finish=finish, exported=exported))

    def _let_go_of_pictures(self, run: Run) -> None:
        if self._loaded.pictures is not None:
            self._loaded.pictures.release(run)

    def _break(self, error: Exception) -> None:
        self._fail(f"{type(error).__name__}: {error}")

    def _gather(self, delta: StepOutput) -> None:
        """Gather the deltas of one turn of the loop, to emit them together."""
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
    """Return an export with the prefill's token and its log probabilities, where it had none."""
    fields["first_gen_tokens"] = fields.get("first_gen_tokens") or (token,)
    if not fields.get("first_gen_log_probs") and output.logprobs:
        fields["first_gen_log_probs"] = (token_logprobs(output.logprobs[0], token),)
    return fields


def _first_token(run: Run, output: Any, reason: FinishReason, fields: dict[str, Any]) -> int | None:
    """Return the token that prefill sampled; at a stop it may have been taken off."""
    if fields.get("first_gen_tokens"):
        return int(fields["first_gen_tokens"][0])
    if reason == "stop":
        return run.stop_token(output)
    return int(output.token_ids[0]) if output.token_ids else None
