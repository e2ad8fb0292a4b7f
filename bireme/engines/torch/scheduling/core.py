"""The engine without its thread: takes requests, runs one step at a time, returns its output.

A step is schedule, build, forward, sample, accept. Everything here runs on the engine's thread; a failing request ends
with INTERNAL and frees its blocks, the others go on.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bireme.engines.base import PlainTokens, RequestKey, StepOutput
from bireme.engines.torch.forward.forward import Computed, Forward, StepPath
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.images.picture_store import PictureStore
from bireme.engines.torch.pools.block_mover import BlockMover
from bireme.engines.torch.scheduling.admission import Admission
from bireme.engines.torch.scheduling.deadlines import Deadlines
from bireme.engines.torch.scheduling.disaggregation import TorchExporter, TorchImporter
from bireme.engines.torch.scheduling.guides import TorchGuides
from bireme.engines.torch.scheduling.metrics import TorchMetrics
from bireme.engines.torch.scheduling.scheduler import Scheduler
from bireme.engines.torch.step import Batch, Post, SchedulerOutput, Sequence, SequenceStatus
from bireme.errors import BiremeError, DeadlineExceededError, RequestCancelledError, to_message
from bireme.kv.blocks.block_manager import BlockManager
from bireme.kv.blocks.block_tiers import BlockCopy, CopyResult
from bireme.logits.sampler import Sampled, Sampler
from bireme.messages import Finish, FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from bireme.engines.torch.forward.resident_decode import (  # Triton's language: CUDA builds alone
        Flight,
        ResidentDecode,
    )

logger = logging.getLogger("bireme.engines.torch")

MAX_FAILED_STEPS = 3  # in a row: then the engine is at fault, not a request


class BrokenEngineError(BiremeError):
    """Every step fails; only a new process can help."""


@dataclass(slots=True)
class Parts:
    """What a core works with; made by loading.py."""

    worker: str
    life: int
    post: Post
    limits: EngineLimits
    forward: Forward
    manager: BlockManager
    sampler: Sampler[RequestKey]
    admission: Admission
    accounts: TorchMetrics
    guides: TorchGuides
    exporter: TorchExporter | None = None
    importer: TorchImporter | None = None
    mover: BlockMover | None = None  # where blocks have tiers below the device
    pictures: PictureStore | None = None  # of a model that takes pictures


@dataclass(slots=True)
class _Started:
    """A decode step whose tokens have not been read."""

    resident: ResidentDecode
    plan: SchedulerOutput
    batch: list[Sequence]  # in the order of its rows
    flight: Flight
    began_at: float


class EngineCore:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.scheduler = Scheduler(parts.manager, parts.limits)
        self.num_steps = 0
        self._sequences: dict[RequestKey, Sequence] = {}
        self._preparing: set[RequestKey] = set()  # whose pictures or guide are still to come
        self._deadlines = Deadlines()
        self._outputs: list[StepOutput] = []
        self._plain = PlainTokens([], [])  # of the last step; what happens between steps is emitted before it
        self._num_added = 0
        self._num_failed_steps = 0
        self._started: _Started | None = None
        self._landed_at = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_preparing(self) -> int:
        """Requests that join the queue once their pictures or guide are there."""
        return len(self._preparing)

    @property
    def num_waiting_tokens(self) -> int:
        return self.scheduler.waiting.num_tokens + self.scheduler.num_prefill_tokens

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_blocks_used(self) -> int:
        return self._parts.manager.num_referenced

    @property
    def is_empty(self) -> bool:
        """Nothing waits, runs or is being imported."""
        return not self._sequences

    @property
    def wakes_at(self) -> float | None:
        """When there is something to do again, if nothing happens before; None: nothing is waited for."""
        return min(filter(None, (self._deadlines.next, self.scheduler.wakes_at)), default=None)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `admission` made."""
        if sequence.key in self._sequences:
            raise AssertionError(f"request {sequence.key} is in the engine already")
        self._num_added += 1
        sequence.number = self._num_added
        self._sequences[sequence.key] = sequence
        try:
            self._begin_request(sequence)
        except Exception as error:  # it would be in no queue, and never end
            logger.exception("request_not_begun request=%r", sequence.key)
            self._fail(sequence, _internal(error))

    def _begin_request(self, sequence: Sequence) -> None:
        if sequence.request.request_type == "context_only":
            assert self._parts.exporter is not None, "the gate lets no context_only through without a transfer"
            self._parts.exporter.reserve(sequence)
        self._watch(sequence)
        self._preparing.add(sequence.key)
        if sequence.pictures is not None and sequence.pictures.is_to_be_computed:
            assert self._parts.pictures is not None
            self._parts.pictures.fetch(sequence, self._pictured)
        else:
            self._prepare_guide(sequence)

    def _pictured(self, sequence: Sequence, error: BiremeError | None) -> None:
        if sequence.state is SequenceStatus.FINISHED:
            return
        if error is not None:
            self._fail(sequence, error)
        else:
            self._prepare_guide(sequence)

    def _prepare_guide(self, sequence: Sequence) -> None:
        if sequence.sampling.guided_decoding is None:
            self._queue(sequence)
        else:
            eos_ids = self._parts.admission.eos_ids(sequence.sampling)
            self._parts.guides.prepare(sequence, eos_ids, self._prepared)

    def _prepared(self, sequence: Sequence, error: BiremeError | None) -> None:
        if sequence.state is SequenceStatus.FINISHED:
            return
        if error is not None:
            self._fail(sequence, error)
        else:
            self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        self._preparing.discard(sequence.key)
        self.scheduler.waiting.push(sequence)

    def abort(self, key: RequestKey) -> None:
        """End a request, or the lease that it left; unknown keys are ignored."""
        if (sequence := self._sequences.get(key)) is not None:
            self._end(sequence, "cancelled", "")
        elif self._parts.exporter is not None:
            self._parts.exporter.abort(key)

    def expire(self, now: float) -> None:
        for sequence, text, is_of_queue in self._deadlines.take(now):
            if sequence.state is SequenceStatus.FINISHED or (is_of_queue and sequence.scheduled_at):
                continue
            self._end(sequence, "timeout", to_message(DeadlineExceededError(text)))

    def fail_all(self, error: BiremeError) -> None:
        """End every request, imports under way included, with this error."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)

    def take_outputs(self) -> tuple[list[StepOutput], PlainTokens]:
        """Return what has happened since the last call, and forget it."""
        outputs, self._outputs, plain, self._plain = self._outputs, [], self._plain, PlainTokens([], [])
        return outputs, plain

    def step(self) -> bool:
        """Do one step, or start one and read the tokens of the one before; False: nothing can run now.

        Raises BrokenEngineError.
        """
        began, started = time.monotonic(), self._started
        if self._parts.mover is not None:
            self._parts.mover.note_computed()
        plan = self.scheduler.schedule() if started is None else started.plan
        if started is None:  # else they have begun with it
            self._start_copies(plan, began)
        if not plan.has_tokens:
            self._offload()
            self._set_levels()
            return bool(plan.imports or plan.onboards)
        try:
            if started is None:
                self._run(plan, began)
            else:
                self._go_on(started, began)
            self._num_failed_steps = 0
        except Exception as error:
            self._started = None
            self._fail_step(plan, error)
        self.num_steps += 1
        self._offload()
        self._set_levels()
        return True

    def prepare(self) -> bool:
        """Do a piece of what makes later steps quicker, if nothing is under way; False: there is none left."""
        return self.is_empty and self._parts.forward.make_next_graph()

    def _run(self, plan: SchedulerOutput, began: float) -> None:
        parts = self._parts
        self._begin(plan, began)
        if not plan.has_tokens:
            return
        if (resident := parts.forward.resident_for(plan)) is not None:
            self._run_resident(resident, plan, began)
            return
        computed = self._compute(plan)
        if computed is None:
            return
        batch, logits = computed.batch, computed.logits
        self._keep_prompt_logprobs(batch, logits)
        sampled = Sampled([], [])
        if batch.sampled:
            keys = [sequence.key for sequence in batch.sampled]
            sampled = parts.sampler.sample(logits[: len(keys)] if batch.prompt_rows else logits, keys)
        else:
            parts.forward.keep_pace()
            self._offload()  # these copies wait for the steps before, so that they are made during this one
            if parts.mover is not None:  # blocks that the step itself lets out of a window: for its end
                parts.mover.note_computed()
        self._advance(plan)
        now = time.monotonic()
        self._accept_all(batch.sampled, sampled, now)
        parts.accounts.stepped(computed.path, now - began, len(batch.sampled))

    def _run_resident(self, resident: ResidentDecode, plan: SchedulerOutput, began: float) -> None:
        """Start a decode step. Where its rows need nothing from here, its tokens are read when the next has started."""
        started = self._start(resident, plan, began)
        rows = [self._parts.sampler.row(sequence.key) for sequence in plan.decodes]
        is_on_its_way = all(row.is_simple for row in rows) and not any(
            sequence.request.request_type == "context_only" for sequence in plan.decodes
        )
        if is_on_its_way and self._parts.limits.overlaps:
            self._started = started
        else:
            self._land(started)

    def _go_on(self, started: _Started, began: float) -> None:
        following = None if _has_guided(started.batch) else self.scheduler.follow(started.plan)
        self._started = None if following is None else self._start(started.resident, following, began, ahead=1)
        if self._started is not None:  # the GPU is busy meanwhile, and copies wait for what it has been given
            self._start_copies(self.scheduler.admit_imports(), began)
        self._land(started)

    def _start(self, resident: ResidentDecode, plan: SchedulerOutput, began: float, ahead: int = 0) -> _Started:
        sampler = self._parts.sampler
        flight = resident.start(plan.decodes, lambda sequence: sampler.row(sequence.key), ahead)
        return _Started(resident, plan, list(plan.decodes), flight, began)

    def _land(self, started: _Started) -> None:
        """Read the tokens of a step; choose those that the GPU could not."""
        sampler, batch = self._parts.sampler, started.batch
        tokens = started.resident.tokens(started.flight)
        sampled = Sampled(tokens, [None] * len(batch))
        running = [row for row, sequence in enumerate(batch) if sequence.state is SequenceStatus.RUNNING]
        edited = [row for row in running if not sampler.row(batch[row].key).is_simple]
        if edited:
            found = sampler.sample(started.flight.logits[edited], [batch[row].key for row in edited])
            for index, row in enumerate(edited):
                tokens[row], sampled.logprobs[row] = found.tokens[index], found.logprobs[index]
            sampled.errors = {edited[index]: error for index, error in found.errors.items()}
        for row in set(running).difference(edited):
            try:
                sampler.accept(batch[row].key, tokens[row])
            except BiremeError as error:
                sampled.errors[row] = error
        started.plan.keep_running()
        self._advance(started.plan)
        now = time.monotonic()
        self._accept_all(batch, sampled, now)
        self._parts.accounts.stepped(StepPath.RESIDENT, now - max(started.began_at, self._landed_at), len(running))
        self._landed_at = now

    def _accept_all(self, sequences: list[Sequence], sampled: Sampled, now: float) -> None:
        for row, sequence in enumerate(sequences):
            if sequence.state is not SequenceStatus.RUNNING:
                continue  # aborted meanwhile
            if (error := sampled.errors.get(row)) is not None:
                self._fail(sequence, error)
            elif not self._accept_plain(sequence, sampled.tokens[row], now):
                self._parts.accounts.num_canary_tokens += sequence.is_canary
                self._accept(sequence, sampled.tokens[row], sampled.logprobs[row], now)

    def _compute(self, plan: SchedulerOutput) -> Computed | None:
        """Return the step's logits. Out of memory ends the request that needs most, and the others' step is done."""
        while plan.has_tokens:
            try:
                return self._parts.forward.run(plan)
            except torch.OutOfMemoryError as error:
                text = str(error).partition(". ")[0]
            # Here, not above: the error's frames held what the failed pass had allocated.
            torch.cuda.empty_cache()
            largest = plan.largest
            logger.error("out_of_memory step=%d request=%s error=%s", self.num_steps, largest.key, text)
            remedy = "lower kv_cache_config.free_gpu_memory_fraction or max_num_tokens, or send less at once"
            self._fail(
                largest, BiremeError(f"out of memory in a step, this request needs most of it: {text}; {remedy}")
            )
            plan.keep_running()
        return None

    def _begin(self, plan: SchedulerOutput, now: float) -> None:
        """Register new sequences with sampler and accounts; one that can't begin leaves the plan."""
        new = [sequence for sequence in plan.decodes if not sequence.is_sampling]
        new += [sequence for sequence, _ in plan.chunks if not sequence.is_sampling]
        for sequence in new:
            try:
                self._add_to_sampler(sequence)
                self._parts.accounts.scheduled(sequence, now)
            except Exception as error:
                self._fail(sequence, _internal(error))
        if any(sequence.state is SequenceStatus.FINISHED for sequence in new):
            plan.keep_running()

    def _add_to_sampler(self, sequence: Sequence) -> None:
        split = sequence.num_prompt
        eos_ids = self._parts.admission.eos_ids(sequence.sampling)
        prompt_ids, output_ids = sequence.tokens[:split], sequence.tokens[split:]
        self._parts.sampler.add(sequence.key, sequence.sampling, prompt_ids, output_ids, eos_ids, sequence.guidance)
        sequence.is_sampling = True

    def _advance(self, plan: SchedulerOutput) -> None:
        """The KV of the step's tokens is in the pools: offer full blocks, free those that slid out of windows."""
        for sequence in plan.decodes:
            self._computed(sequence, 1)
        for sequence, count in plan.chunks:
            self._computed(sequence, count)

    def _computed(self, sequence: Sequence, count: int) -> None:
        manager = self._parts.manager
        sequence.computed += count
        manager.commit(sequence.table, sequence.tokens, sequence.computed)
        manager.slide(sequence.table, sequence.computed)

    def _keep_prompt_logprobs(self, batch: Batch, logits: Tensor) -> None:
        for rows in batch.prompt_rows:
            count = rows.sequence.sampling.prompt_logprobs or 0
            wanted = logits[rows.begin : rows.begin + len(rows.next_ids)]
            if rows.next_ids:
                rows.sequence.prompt_logprobs += self._parts.sampler.prompt_logprobs(wanted, rows.next_ids, count)

    def _accept_plain(self, sequence: Sequence, token: int, now: float) -> bool:
        """Take a sampled token if there is nothing to say of it: neither the first nor the last, no logprobs."""
        is_last = token in sequence.stop_ids or sequence.num_output + 1 >= sequence.max_tokens
        if is_last or not sequence.first_token_at or sequence.sampling.logprobs is not None:
            return False
        self._parts.accounts.delivered(sequence, now)
        sequence.tokens.append(token)
        sequence.last_token_at = now
        self._plain.keys.append(sequence.key)
        self._plain.tokens.append(token)
        return True

    def _accept(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Take a sampled token: deliver it, or end the request with it."""
        delta = StepOutput(sequence.key)
        if not sequence.first_token_at:
            self._parts.accounts.first_token(sequence, now)
            self.scheduler.prefilled(sequence)
            if self._parts.pictures is not None and not self._parts.limits.may_preempt:
                self._parts.pictures.release(sequence)
            if sequence.wants_prompt_logprobs:
                delta.prompt_logprobs = sequence.prompt_logprobs
                sequence.wants_prompt_logprobs = False  # delivered: a preemption must not compute them again
        stop = token in sequence.stop_ids
        if not stop:
            if not sequence.is_canary:
                self._parts.accounts.delivered(sequence, now)
            sequence.tokens.append(token)
            delta.tokens.append(token)
            if logprobs is not None:
                delta.logprobs = [logprobs]
        sequence.last_token_at = now
        if sequence.request.request_type == "context_only":
            self._hand_over(sequence, token, logprobs, stop, delta)
        elif stop:
            self._finish(sequence, "stop", delta, stop_token_id=token)
        elif sequence.num_output >= sequence.max_tokens:
            self._finish(sequence, "length", delta)
        else:
            self._outputs.append(delta)

    def _hand_over(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, stop: bool, delta: StepOutput
    ) -> None:
        """End a context_only request. Where its one token is the last, decode needs no KV and none is exported."""
        parts, exporter = self._parts, self._parts.exporter
        assert exporter is not None
        usage = parts.accounts.usage(sequence, sequence.last_token_at)
        delta.exported = exporter.params(sequence, parts.worker, parts.life, token, logprobs, usage)
        if stop:
            self._finish(sequence, "stop", delta, stop_token_id=token)
        elif sequence.num_output >= sequence.max_tokens:
            self._finish(sequence, "length", delta)
        else:
            self._forget(sequence)
            exporter.export(sequence)
            self._report(sequence, "not_finished", delta)

    def _start_copies(self, plan: SchedulerOutput, now: float) -> None:
        """Let the KV come of those that were admitted without a part in the step."""
        for sequence in plan.imports:
            self._start_import(sequence, now)
        for sequence, copies in plan.onboards:
            self._start_onboarding(sequence, copies)

    def _start_import(self, sequence: Sequence, now: float) -> None:
        """Fetch the rows; the token that prefill has sampled is delivered now and not when they are there."""
        params = sequence.params
        assert params is not None and self._parts.importer is not None
        self._parts.accounts.scheduled(sequence, now)
        token, logprobs = params.first_gen_tokens[0], params.first_gen_log_probs
        try:
            if token in sequence.stop_ids or sequence.num_output + 1 >= sequence.max_tokens:
                sequence.imported_at = now  # its first token is the last: no KV is needed
                sequence.computed = len(sequence.tokens)
            else:
                self._parts.importer.fetch(sequence, self._imported)
            if sequence.guidance is not None:
                sequence.guidance.accept(token)
            sequence.tokens.append(token)
            self._add_to_sampler(sequence)
            sequence.tokens.pop()
            self._accept(sequence, token, logprobs[0] if logprobs else None, now)
        except Exception as error:
            self._fail(sequence, _internal(error))

    def _start_onboarding(self, sequence: Sequence, copies: list[BlockCopy]) -> None:
        """Let the blocks that lower tiers have come to the device; the request takes no part in steps until then."""
        mover, post = self._parts.mover, self._parts.post
        assert mover is not None
        sequence.fetch = mover.onboard(
            copies, lambda copies, results: post(partial(self._onboarded, sequence, copies, results))
        )

    def _onboarded(self, sequence: Sequence, copies: list[BlockCopy], results: list[CopyResult]) -> None:
        self._parts.manager.onboarded(sequence.table, copies, results)
        self.scheduler.waiting.unpark()
        sequence.fetch = None
        if sequence.ending is not None:
            self._finish(sequence, sequence.ending[0], StepOutput(sequence.key), error=sequence.ending[1])
        elif any(result is not CopyResult.DONE for result in results):
            self.scheduler.requeue(sequence)  # what could not be read is computed
        else:
            self.scheduler.found(sequence)
            if sequence.params is not None and not sequence.is_sampling:
                self._start_import(sequence, time.monotonic())
            else:
                sequence.state = SequenceStatus.RUNNING

    def _offload(self) -> None:
        """Start the copies of blocks that may be evicted soon."""
        mover, post, tiers = self._parts.mover, self._parts.post, self._parts.manager.tiers
        if mover is None or not (copies := tiers.offload()):
            return

        mover.offload(copies, lambda copies, results: post(partial(tiers.offloaded, copies, results)))

    def _imported(self, sequence: Sequence, error: BiremeError | None) -> None:
        """All rows have been written, or the import has failed."""
        if sequence.state is not SequenceStatus.IMPORTING:
            return
        sequence.fetch = None
        if sequence.ending is not None:
            self._finish(sequence, sequence.ending[0], StepOutput(sequence.key), error=sequence.ending[1])
        elif error is not None:
            self._fail(sequence, error)
        else:
            try:
                self._join(sequence)
            except Exception as failure:
                self._fail(sequence, _internal(failure))

    def _join(self, sequence: Sequence) -> None:
        """All rows before its first token are there: it takes part in steps."""
        sequence.state, sequence.imported_at = SequenceStatus.RUNNING, time.monotonic()
        sequence.computed = len(sequence.tokens) - 1
        self._parts.manager.commit(sequence.table, sequence.tokens, sequence.computed, sequence.imported_from)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str) -> None:
        """End a request between steps; one whose KV is being copied ends when the copy has."""
        if sequence.state is SequenceStatus.IMPORTING and sequence.fetch is not None:
            sequence.ending = sequence.ending or (reason, error)
            sequence.fetch.cancel()
            return
        self._finish(sequence, reason, StepOutput(sequence.key), error=error)

    def _fail(self, sequence: Sequence, error: BiremeError) -> None:
        reason: FinishReason = "error"
        if isinstance(error, DeadlineExceededError):
            reason = "timeout"
        elif isinstance(error, RequestCancelledError):
            reason = "cancelled"
        self._end(sequence, reason, "" if reason == "cancelled" else to_message(error))

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        delta: StepOutput,
        error: str = "",
        stop_token_id: int | None = None,
    ) -> None:
        """Free what it holds and report its end."""
        self._forget(sequence)
        self._parts.manager.release(sequence.table)
        if sequence.lease is not None:
            sequence.lease.abort()
        self._report(sequence, reason, delta, error, stop_token_id)

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._sequences.pop(sequence.key, None)
        self._preparing.discard(sequence.key)
        self._parts.sampler.remove(sequence.key)
        if self._parts.pictures is not None:
            self._parts.pictures.release(sequence)

    def _report(
        self,
        sequence: Sequence,
        reason: FinishReason,
        delta: StepOutput,
        error: str = "",
        stop_token_id: int | None = None,
    ) -> None:
        now = time.monotonic()
        delta.finish = Finish(reason, self._parts.accounts.usage(sequence, now), error, stop_token_id)
        self._parts.accounts.finished(sequence, reason, error, now)
        self._outputs.append(delta)

    def _fail_step(self, plan: SchedulerOutput, error: Exception) -> None:
        """End the requests of a step that raised. Raises BrokenEngineError when steps keep failing."""
        self._num_failed_steps += 1
        members = [*plan.decodes, *(sequence for sequence, _ in plan.chunks)]
        logger.exception(
            "step_failed step=%d requests=%d in_a_row=%d", self.num_steps, len(members), self._num_failed_steps
        )
        for sequence in members:
            if sequence.state is not SequenceStatus.FINISHED:
                self._fail(sequence, _internal(error))
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise BrokenEngineError(
                f"{self._num_failed_steps} steps in a row failed, the last with {error!r}"
            ) from error

    def _watch(self, sequence: Sequence) -> None:
        limit_s = self._parts.limits.max_queue_time_s
        if limit_s:
            text = f"queue time: not begun after {limit_s:g} s (scheduler_config.max_queue_time_s); try again later"
            self._deadlines.add(sequence.arrived_at + limit_s, sequence, text, is_of_queue=True)
        if sequence.deadline:
            text = f"timeout_ms: {sequence.request.timeout_ms} ms have passed"
            self._deadlines.add(sequence.deadline, sequence, text)

    def _set_levels(self) -> None:
        scheduler = self.scheduler
        self._parts.accounts.levels(
            self._parts.manager,
            self.num_running,
            self.num_waiting,
            scheduler.num_preemptions,
            scheduler.best_effort.num_rests,
        )


def _has_guided(batch: list[Sequence]) -> bool:
    """Whether the next step needs tokens that are chosen here: one of these has come to what its guide holds."""
    return any(sequence.guidance is not None and not sequence.guidance.is_free for sequence in batch)


def _internal(error: Exception) -> BiremeError:
    return error if isinstance(error, BiremeError) else BiremeError(f"{type(error).__name__}: {error}")
