"""One sequence and its attempts: placement, prefill, decode, and other workers when one is lost.

    place -> prefill (context_only) -> decode (generation_only) -> finish
          -> decode (aggregated)                                -> finish

The sequence is the sink of the decode worker that has it: tokens go on to its TextStream at once, which keeps them, so
that after a loss another worker can be given prompt + tokens. The client notices nothing.

What ends an attempt, and what follows:
    engine lost, lease gone                    another attempt; pipeline.migration_limit of these. Where the engine
                                               stalled for nobody knows whom, the next one tries it alone
    refused (not ready, not there, draining),  another attempt after a pause, until pipeline.stall_timeout_s: no engine
    queue full                                 had it (a full queue only if tokens have been delivered already)
    KV transfer failed                         aggregated, at once; where the recipe forbids that and no token has been
                                               delivered, as if refused
    anything else                              the request's end
Each time the worker at fault (prefill, if its KV did not arrive) is skipped for a while. After a loss with tokens
delivered, decode computes the context itself: aggregated, whatever the recipe says.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import secrets
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

import msgspec
import numpy as np

from bireme.child_process import Backoff
from bireme.discovery.records import WorkerRecord
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    EngineLostError,
    EngineStalledError,
    KvTransferError,
    NotFoundError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    drop_frames,
    from_message,
)
from bireme.kv.routing.placement import Candidate, Placement, RoutingRequest
from bireme.messages import EngineRequest, Finish, Logprobs, SamplingParams, Usage
from bireme.metrics import Registry
from bireme.pipelines.pictures import RequestEmbeddings, RequestPictures
from bireme.pipelines.sequence_spans import SequenceSpans
from bireme.pipelines.services import Services
from bireme.request import Ids
from bireme.request_trace import RequestTrace, TracedSequence
from bireme.serving_options import NO_OPTIONS, ServingOptions
from bireme.text.detokenizer import Detokenizer
from bireme.text.output import TextStream, TokenDelta
from bireme.workers.base import Generation, PrefillResult, UnreachableError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
_T = TypeVar("_T")
DEADLINE_GRACE_S = 1.0  # engines keep deadlines themselves; this is for those that don't


class Push(Protocol):  # Sink.push
    def __call__(self, tokens: Sequence[int], logprobs: Logprobs = None, prompt_logprobs: Logprobs = None) -> None: ...


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence needs to run, checked and tokenized."""

    prompt: Ids  # CPU 1D
    sampling: SamplingParams  # n is 1, a seed is drawn
    options: ServingOptions = NO_OPTIONS
    deadline: float = 0.0  # time.monotonic(); 0: none
    prediction: bytes = b""  # EngineRequest's
    pictures: RequestPictures | None = None  # of a prompt that has room for them
    trace: RequestTrace | None = None  # None: nobody traces it

    def routing_request(
        self, is_resumed: bool = False, has_transfer: bool = True, made_by: WorkerRecord | None = None
    ) -> RoutingRequest:
        """`made_by`: whose tokens were delivered."""
        generation = self.pictures.generation if self.pictures is not None else None
        return RoutingRequest(
            prompt=self.prompt,
            options=self.options,
            media=self.pictures.spans if self.pictures is not None else (),
            is_resumed=is_resumed,
            has_transfer=has_transfer,
            revision=made_by.revision if made_by is not None else "",
            generation=made_by.generation if made_by is not None else generation,
        )


class _KvState(enum.Enum):
    """Where a prefill's KV is: what is neither kept nor claimed when an attempt ends is freed."""

    PENDING = "pending"  # prefill computes it, or could not
    OFFERED = "offered"  # prefill holds it under a lease, which decode may have claimed or not
    KEPT = "kept"  # decode refused: the lease is the next attempt's
    CLAIMED = "claimed"  # decode has generated with it to the end


class SequenceRunner:
    """Runs once. `push` and `finish` are for workers, on the loop's thread."""

    push: Push  # the stream's own after the first token, to save a call

    def __init__(
        self,
        services: Services,
        request: SequenceRequest,
        detokenizer: Detokenizer,
        send: Callable[[TokenDelta], None],
        index: int | None = None,
    ) -> None:
        self._services, self._request = services, request
        self.metrics = services.metrics_of(request.options.cache_salt)
        self._stream = TextStream(detokenizer, request.sampling, send, self._settle, self.abort, index)
        self._spans: SequenceSpans | None = None
        if request.trace is not None:
            told = TracedSequence(index or 0, request.prompt, request.options)
            self._spans = SequenceSpans(request.trace, told)
        self.push = self._push_first
        self.first_token_at = 0.0
        self.ended_at = 0.0
        self.migrations = 0
        self._generation: Generation | None = None
        self._ended: asyncio.Future[Finish] | None = None
        self._placement: Placement | None = None
        self._lease: _Lease | None = None  # of this attempt; between two only one that is kept
        self._prefill: tuple[str, Usage] | None = None  # worker and usage of the prefill that made the first token
        self._predicted_tokens: int | None = None  # of the prompt, that its worker should have found in its cache
        self._made_by: WorkerRecord | None = None  # the tokens; None: there are none, or its record is not known
        self._has_kv = True  # a prefill's KV has arrived so far whenever it was to
        self._prompt_logprobs: Logprobs = None  # prefill's, until they are sent
        self._failing_since = 0.0
        self._backoff: Backoff | None = None  # of attempts that were refused
        self._was_in_stall = False  # of its last engine, and perhaps for its sake
        self._lost_at = 0.0
        self._lost_ms = 0.0  # decode time of lost attempts
        self._usage: Usage | None = None  # of a sequence that has ended well

    @property
    def tokens(self) -> list[int]:
        return self._stream.output_ids

    @property
    def finish_reason(self) -> str:
        return self._stream.finish_reason

    @property
    def prompt(self) -> Ids:
        return self._request.prompt

    @property
    def cache_salt(self) -> str:
        return self._request.options.cache_salt

    def known_usage(self) -> Usage:
        """Return the account of what engines have computed, once it has ended.

        Of one that was cancelled or failed that is what had reached this process: delivered tokens, a prompt that has
        led to one or whose prefill was done, and the time since.
        """
        if self._usage is not None:
            return msgspec.structs.replace(self._usage, completion_tokens=len(self.tokens))
        prefill = self._prefill[1] if self._prefill is not None else Usage()
        return Usage(
            prompt_tokens=len(self.prompt) if self.first_token_at or self._prefill is not None else 0,
            cached_tokens=prefill.cached_tokens,
            completion_tokens=len(self.tokens),
            prefill_ms=prefill.prefill_ms,
            decode_ms=1e3 * (time.monotonic() - self.first_token_at) if self.first_token_at else 0.0,
        )

    def _push_first(self, tokens: Sequence[int], logprobs: Logprobs = None, prompt_logprobs: Logprobs = None) -> None:
        self.first_token_at = time.monotonic()
        self.push = self._stream.push
        if self._spans is not None:
            self._spans.first_token(self.first_token_at)
            self.push = self._usual_push()
        self._note_prefilled()
        mine, self._prompt_logprobs = self._prompt_logprobs, None
        self.push(tokens, logprobs, mine if prompt_logprobs is None else prompt_logprobs)

    def _push_again(self, tokens: Sequence[int], logprobs: Logprobs = None, prompt_logprobs: Logprobs = None) -> None:
        """Take the first tokens after a loss; the bus knows only the gaps within an attempt."""
        self.metrics.observe("bireme_inter_token_latency_seconds", time.monotonic() - self._lost_at)
        self.push = self._usual_push()
        self._note_prefilled()
        self.push(tokens, logprobs, prompt_logprobs)

    def _usual_push(self) -> Push:
        """Return what takes tokens between the first and a loss."""
        is_noted = self._spans is not None and self._spans.keeps_token_times
        return self._push_noted if is_noted else self._stream.push

    def _push_noted(self, tokens: Sequence[int], logprobs: Logprobs = None, prompt_logprobs: Logprobs = None) -> None:
        assert self._spans is not None
        self._spans.note_tokens(len(tokens))
        self._stream.push(tokens, logprobs, prompt_logprobs)

    def _note_prefilled(self) -> None:
        if self._placement is not None and self._placement.prefill is None:
            self._services.router.prefilled(self._placement)

    def finish(self, finish: Finish) -> None:
        if self._ended is not None and not self._ended.done():  # else it was given up before
            if self._prompt_logprobs is not None and finish.reason in ("stop", "length"):  # ended without a token
                self.push((), None, None)
            whole = self._whole(finish)
            if self._spans is not None:
                self._spans.decoded(finish)
            self._end(whole)

    def _end(self, finish: Finish) -> None:
        self._stream.finish(finish)
        if self._spans is not None and self._stream.finish_reason:
            self._spans.ended(finish, self._stream.finish_reason)

    def _settle(self, finish: Finish) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(finish)

    # Attempts

    def abort(self) -> None:
        """Stop generating (a stop string was found); the engine's finish still comes."""
        if self._generation is not None:
            self._generation.abort()

    async def run(self) -> None:
        """Return when the last delta has been sent. Raises the error that ends it otherwise.

        Cancelling this task aborts the request and frees its leases.
        """
        try:
            while True:
                placement = None
                try:
                    if self._spans is not None:
                        self._spans.begin_attempt()
                    request = self._engine_request()
                    placement = self._placement = self._place()
                    await self._attempt(request, placement)
                    return
                except (UnavailableError, ResourceExhaustedError) as error:
                    if placement is not None and self._has_all_tokens(placement.decode):  # only its end was lost
                        self._end(self._whole(Finish("length", Usage(completion_tokens=len(self.tokens)))))
                        return
                    if self._spans is not None:
                        self._spans.note_error(error)
                    pause_s = self._plan_retry(error)
                    drop_frames(error)
                finally:
                    if placement is not None:
                        self._services.router.finished(placement)
                    if self._spans is not None:
                        self._spans.end_attempt(len(self.tokens))
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            self.ended_at = time.monotonic()
            if self._lease is not None:
                self._lease.release()
            # Break the cycles of references: at hundreds of requests a second a collector would come late.
            self._stream.close()
            self.push, self._generation = self._stream.push, None

    def _has_all_tokens(self, worker: str) -> bool:
        """Return whether no engine would make another token; they refuse a request with none left to make."""
        capacity, limits = self._services.workers.capacity(worker), self._services.recipe.limits
        context = capacity.max_seq_len - len(self._request.prompt) if capacity is not None else None
        bounds = [n for n in (self._request.sampling.max_tokens, limits.max_tokens, context) if n is not None]
        return bool(self.tokens and bounds) and len(self.tokens) >= min(bounds)

    def _plan_retry(self, error: BiremeError) -> float:
        """Return the wait before the next attempt, or raise `error` when there is none."""
        now, recipe, has_begun = time.monotonic(), self._services.recipe, bool(self.tokens)
        if isinstance(error, ResourceExhaustedError) and not has_begun:
            raise error
        if isinstance(error, KvTransferError) and (has_begun or not recipe.pipeline.enforce_disaggregation):
            return 0.0
        if isinstance(error, UnreachableError) and not (has_begun or self.migrations or recipe.discovery.is_shared):
            raise error  # a fixed address, which is wrong
        self._failing_since = self._failing_since or now
        if isinstance(error, EngineLostError):
            self._was_in_stall = isinstance(error, EngineStalledError)
            self.migrations += 1
            if self.migrations > recipe.pipeline.migration_limit:
                raise UnavailableError(
                    f"{error}; moved {recipe.pipeline.migration_limit} times already (pipeline.migration_limit)"
                ) from error
            self.metrics.add("bireme_migrations_total")
            self._services.note_fault("migration", self._losing_worker(), f"after {len(self.tokens)} tokens: {error}")
            sampling = self._request.sampling
            # One of several sequences may have been at fault with its own work, which the others have, too: it ends
            # them before they are sent again.
            return FIRST_PAUSE_S if sampling.logits_processors or sampling.guided_decoding else 0.0
        if now - self._failing_since > recipe.pipeline.stall_timeout_s:
            raise error
        self._backoff = self._backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        return self._backoff.next_s()

    async def _attempt(self, request: EngineRequest, placement: Placement) -> None:
        """Have the request computed once, with the lease that an attempt before this one kept, if any.

        Raises what went wrong; only a lease that is still good is kept then.
        """
        pictures: RequestEmbeddings | None = None  # for whichever engine computes the prompt
        try:
            if self._lease is None:
                self._predicted_tokens = placement.cached_tokens
                if self._request.pictures is not None:
                    revision = self._services.revision_of(placement.prefill or placement.decode)
                    pictures = await self._request.pictures.take(revision)
                    request = msgspec.structs.replace(request, multimodal=pictures.multimodal)
            if placement.prefill is not None:
                request = await self._prefilled(request, placement, placement.prefill)
            elif not self.tokens:
                self._prefill = None
            num_tokens = len(self.tokens)
            error = await self._decode(placement.decode, _on_rank(request, placement.decode_dp_rank))
            if error is not None:
                self._blame(error, placement, was_refused=len(self.tokens) == num_tokens)
        finally:
            self._let_go()
            if pictures is not None and not self._stream.finish_reason:
                pictures.release()  # an engine that finished has fetched them all

    def _let_go(self) -> None:
        """End the lease of the attempt that is over, but one that is kept for the next."""
        if self._lease is not None and self._lease.state is not _KvState.KEPT:
            self._lease.release()
            self._lease = None

    def _place(self) -> Placement:
        """Have the router choose. Raises what it refuses."""
        metrics = self.metrics
        request = self._request.routing_request(bool(self.tokens), self._has_kv, self._made_by)
        try:
            if (spans := self._spans) is None or not spans.has_details:
                placement = self._services.router.place(request)
            else:
                placement = self._place_told(request, spans)
        except ResourceExhaustedError as error:
            metrics.add("bireme_routing_decisions_total", 1, "refused")
            self._services.note_fault("busy", "", error)
            raise
        _count(metrics, placement)
        if placement.prefill is None and self._lease is not None:  # decode computes the prompt itself
            self._lease.release()
            self._lease = None
        return placement

    def _place_told(self, request: RoutingRequest, spans: SequenceSpans) -> Placement:
        route, candidates = spans.begin_route(), list[Candidate]()
        try:
            placement = self._services.router.place(request, seen=candidates)
        except BiremeError as error:
            spans.refused(route, error)
            raise
        spans.routed(route, placement, candidates)
        return placement

    async def _prefilled(self, request: EngineRequest, placement: Placement, worker: str) -> EngineRequest:
        """Have prefill compute the prompt, unless it has; return the request for decode, which takes over.

        Raises UnavailableError when the worker is lost or missing.
        """
        lease, router, sampling = self._lease, self._services.router, request.sampling
        if lease is None:
            asked = _on_rank(request, placement.prefill_dp_rank)
            if self._spans is not None:
                asked = self._spans.begin_call("prefill", worker, asked)
            lease = self._lease = _Lease(self._services, worker, asked)
            try:
                await _within(asyncio.shield(lease.call), self._request.deadline)
            except UnavailableError as error:
                router.note_down(worker)
                self._note_unreachable(worker, error)
                raise
            router.note_up(worker)
        result, lease.state = lease.call.result(), _KvState.OFFERED
        if self._spans is not None:
            self._spans.prefilled(result.spans)
        router.prefilled(placement)
        self._prefill = (lease.worker, result.usage)
        if sampling.prompt_logprobs is not None:
            if result.prompt_logprobs is None:
                raise BiremeError(f"prompt_logprobs: the answer of {lease.worker} lacks them")
            self._prompt_logprobs = result.prompt_logprobs
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            request,
            sampling=sampling,
            request_type="generation_only",
            disaggregated_params=result.disaggregated_params,
            multimodal=self._request.pictures.places if self._request.pictures else None,
        )

    def _engine_request(self) -> EngineRequest:
        """Return what is asked for now: the prompt and what has been delivered, in the time that is left."""
        own, resumed = self._request, self.tokens
        prompt, timeout_ms = own.prompt, 0
        if resumed:
            prompt = np.concatenate([prompt, np.array(resumed, np.int32)])
        if own.deadline:
            remaining_s = own.deadline - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceededError(f"the request's time limit has passed, {len(resumed)} tokens were made")
            timeout_ms = max(1, int(remaining_s * 1000))
        return EngineRequest(
            prompt=prompt.tobytes(),
            sampling=msgspec.structs.replace(own.sampling, prompt_logprobs=None) if resumed else own.sampling,
            num_resumed=len(resumed),
            options=own.options,
            timeout_ms=timeout_ms,
            prediction=own.prediction,
            was_in_stall=self._was_in_stall,
        )

    async def _decode(self, worker: str, request: EngineRequest) -> BiremeError | None:
        """Generate on one worker. Returns the error of its finish."""
        began_at, record = time.monotonic(), self._services.members.get(worker)
        num_tokens = len(self.tokens)
        if self._spans is not None:
            request = self._spans.begin_call("decode", worker, request)
        self._ended = asyncio.get_running_loop().create_future()
        generation = self._generation = self._services.workers.decode(worker, request, self)
        try:
            finish = await _within(self._ended, self._request.deadline)
        finally:
            if self._ended.cancelled() or not self._ended.done():
                generation.abort()
            self._ended = None
        has_grown = len(self.tokens) > num_tokens
        if self._stream.finish_reason:
            self._usage = finish.usage
            self._services.router.note_up(worker)
            if self._lease is not None and has_grown:
                self._lease.state = _KvState.CLAIMED
            return None
        self._lost_at = time.monotonic()
        self._lost_ms += (self._lost_at - began_at) * 1000
        if self.tokens:
            self.push = self._push_again
        if has_grown:
            self._failing_since, self._backoff = 0.0, None
            self._made_by = record
        if finish.reason == "cancelled":
            return RequestCancelledError("the request was aborted")
        return generation.failure or from_message(finish.error)

    def _blame(self, error: BiremeError, placement: Placement, was_refused: bool) -> NoReturn:
        """Have the worker at fault skipped for a while; raise the error. `was_refused`: no token came."""
        router = self._services.router
        if isinstance(error, KvTransferError):
            self._has_kv = False
            if placement.prefill is not None:
                router.note_down(placement.prefill)
            self._services.note_fault("transfer_failed", placement.prefill or placement.decode, error)
        elif isinstance(error, UnavailableError):
            router.note_down(placement.decode)
            self._note_unreachable(placement.decode, error)
            if self._lease is not None and was_refused and not isinstance(error, EngineLostError):
                self._lease.state = _KvState.KEPT
        elif isinstance(error, ResourceExhaustedError):
            self._services.note_fault("busy", placement.decode, error)
        elif isinstance(error, NotFoundError) and self._lease is not None:
            raise EngineLostError(str(error)) from error  # the lease expired, or its engine is another by now
        raise error

    def _losing_worker(self) -> str:
        """Return whose engine went away with the last attempt: prefill's, where it had not answered yet."""
        placement = self._placement
        if placement is None:
            return ""
        return placement.decode if self._prefill is not None or placement.prefill is None else placement.prefill

    def _note_unreachable(self, worker: str, error: UnavailableError) -> None:
        if isinstance(error, UnreachableError):
            self._services.note_fault("unreachable", worker, error)

    def _whole(self, finish: Finish) -> Finish:
        """Return the finish with the usage of all attempts.

        A decode engine that took over a prefill includes that one's figures: they came with the params.
        """
        assert self._placement is not None
        usage = msgspec.structs.replace(
            finish.usage,
            prompt_tokens=len(self._request.prompt),
            decode_ms=finish.usage.decode_ms + self._lost_ms,
            decode_worker=self._placement.decode,
        )
        if self._prefill is not None:
            usage.prefill_worker, prefill = self._prefill
            usage.cached_tokens = prefill.cached_tokens
            if self._placement.prefill is None:  # an earlier attempt had it; this one computed its context
                usage.queue_ms += prefill.queue_ms
                usage.prefill_ms += prefill.prefill_ms
        if self._predicted_tokens is not None and not self.migrations:
            usage.predicted_cached_tokens = self._predicted_tokens
            self._measure_prediction(usage, self._predicted_tokens)
        return Finish(finish.reason, usage, finish.error, finish.stop_token_id)

    def _measure_prediction(self, usage: Usage, predicted: int) -> None:
        """Compare what the router expected the prompt's worker to hold with what it did."""
        metrics = self.metrics
        metrics.add("bireme_router_prompt_tokens_total", usage.prompt_tokens)
        metrics.add("bireme_router_predicted_tokens_total", predicted)
        metrics.add("bireme_router_cached_tokens_total", usage.cached_tokens)
        metrics.add("bireme_router_mispredicted_tokens_total", abs(predicted - usage.cached_tokens))
        metrics.observe("bireme_router_prediction_error_tokens", abs(predicted - usage.cached_tokens))


class _Lease:
    """One prefill: the call, which begins at once, and the KV that it leaves leased until decode has claimed it."""

    def __init__(self, services: Services, worker: str, request: EngineRequest) -> None:
        self._services, self.worker, self.state = services, worker, _KvState.PENDING
        self._request_id = secrets.token_hex(16)  # nobody else can abort it
        request = msgspec.structs.replace(request, request_type="context_only", prediction=b"")
        self.call = asyncio.ensure_future(services.workers.prefill(worker, request, self._request_id))
        self.call.add_done_callback(_notice)

    def release(self) -> None:
        """Stop the prefill, or free its lease, in the background, unless decode has claimed it."""
        has_failed = self.call.done() and (self.call.cancelled() or self.call.exception() is not None)
        if not has_failed and self.state is not _KvState.CLAIMED:
            self._services.run_in_background(self._abort())

    async def _abort(self) -> None:
        was_done = self.call.done()
        with contextlib.suppress(NotFoundError):
            await self._services.workers.abort_prefill(self.worker, self._request_id)
        if was_done:
            return
        try:
            await self.call
        except BiremeError:
            return
        with contextlib.suppress(NotFoundError):  # it was faster than the abort
            await self._services.workers.abort_prefill(self.worker, self._request_id)


def _count(metrics: Registry, placement: Placement) -> None:
    metrics.add("bireme_routing_decisions_total", 1, placement.reason)
    for worker in filter(None, (placement.prefill, placement.decode)):
        metrics.add("bireme_routed_total", 1, worker)
    if placement.generation is not None:
        metrics.add("bireme_routed_generations_total", 1, str(placement.generation))
    if placement.prefill is not None or placement.is_short:
        metrics.add("bireme_prompts_placed_total", 1, "decode" if placement.is_short else "prefill")


def _on_rank(request: EngineRequest, dp_rank: int | None) -> EngineRequest:
    return request if request.dp_rank == dp_rank else msgspec.structs.replace(request, dp_rank=dp_rank)


def _notice(call: asyncio.Future[PrefillResult]) -> None:
    """Read its error, which no one awaits: asyncio would report it as never retrieved."""
    if not call.cancelled():
        call.exception()


async def _within(future: asyncio.Future[_T], deadline: float) -> _T:
    """Await it, at most until a second past the deadline; 0: there is none."""
    if not deadline:
        return await future
    try:
        async with asyncio.timeout(deadline - time.monotonic() + DEADLINE_GRACE_S):
            return await future
    except TimeoutError:
        raise DeadlineExceededError("the request's time limit has passed") from None
