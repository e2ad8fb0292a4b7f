"""Requests from when they are added to their end: what they wait for before they queue, and what they leave behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from bireme.engines.base import RequestKey, StepOutput
from bireme.engines.torch.scheduling.deadlines import Deadlines
from bireme.engines.torch.scheduling.parts import Parts
from bireme.engines.torch.scheduling.scheduler import Scheduler
from bireme.engines.torch.scheduling.tracing import told
from bireme.engines.torch.step import Sequence, SequenceStatus
from bireme.errors import BiremeError, DeadlineExceededError, RequestCancelledError, to_message
from bireme.messages import Finish, FinishReason

logger = logging.getLogger("bireme.engines.torch")


class OpenRequests:
    def __init__(self, parts: Parts, scheduler: Scheduler) -> None:
        self.running: dict[RequestKey, Sequence] = {}  # all that have no end
        self.preparing: set[RequestKey] = set()  # whose pictures or guide are still to come
        self.outputs: list[StepOutput] = []
        self.deadlines = Deadlines()
        self._parts, self._scheduler = parts, scheduler
        self._num_added = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `admission` made, once its pictures and its guide are there."""
        if sequence.key in self.running:
            raise AssertionError(f"request {sequence.key} is in the engine already")
        self._num_added += 1
        sequence.number = self._num_added
        self.running[sequence.key] = sequence
        try:
            self._begin(sequence)
        except Exception as error:  # it would be in no queue, and never end
            logger.exception("request_not_begun request=%r", sequence.key)
            self.fail(sequence, error)

    def _begin(self, sequence: Sequence) -> None:
        if sequence.request.request_type == "context_only":
            assert self._parts.exporter is not None, "the gate lets no context_only through without a transfer"
            self._parts.exporter.reserve(sequence)
        self._watch(sequence)
        self.preparing.add(sequence.key)
        if sequence.pictures is not None and sequence.pictures.is_to_be_computed:
            assert self._parts.pictures is not None
            self._parts.pictures.fetch(sequence, partial(self._go_on, self._prepare_guide))
        else:
            self._prepare_guide(sequence)

    def _watch(self, sequence: Sequence) -> None:
        limit_s = self._parts.limits.max_queue_time_s
        if limit_s:
            text = f"queue time: not begun after {limit_s:g} s (scheduler_config.max_queue_time_s); try again later"
            self.deadlines.add(sequence.arrived_at + limit_s, sequence, text, is_of_queue=True)
        if sequence.deadline:
            text = f"timeout_ms: {sequence.request.timeout_ms} ms have passed"
            self.deadlines.add(sequence.deadline, sequence, text)

    def _go_on(self, then: Callable[[Sequence], None], sequence: Sequence, error: BiremeError | None) -> None:
        """What it has waited for is there, or can't be had."""
        if sequence.state is SequenceStatus.FINISHED:
            return
        if error is not None:
            self.fail(sequence, error)
        else:
            then(sequence)

    def _prepare_guide(self, sequence: Sequence) -> None:
        if sequence.sampling.guided_decoding is None:
            self._queue(sequence)
        else:
            eos_ids = self._parts.admission.eos_ids(sequence.sampling)
            self._parts.guides.prepare(sequence, eos_ids, partial(self._go_on, self._queue))

    def _queue(self, sequence: Sequence) -> None:
        self.preparing.discard(sequence.key)
        self._scheduler.waiting.push(sequence)

    def abort(self, key: RequestKey) -> None:
        """End a request, or the lease that it left; unknown keys are ignored."""
        if (sequence := self.running.get(key)) is not None:
            self.end(sequence, "cancelled")
        elif self._parts.exporter is not None:
            self._parts.exporter.abort(key)

    def expire(self, now: float) -> None:
        for sequence, text, is_of_queue in self.deadlines.take(now):
            if sequence.state is SequenceStatus.FINISHED or (is_of_queue and sequence.scheduled_at):
                continue
            self.end(sequence, "timeout", to_message(DeadlineExceededError(text)))

    def fail_all(self, error: BiremeError) -> None:
        """End every request, imports under way included, with this error."""
        for sequence in list(self.running.values()):
            self.fail(sequence, error)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        known = error if isinstance(error, BiremeError) else BiremeError(f"{type(error).__name__}: {error}")
        if isinstance(known, RequestCancelledError):
            self.end(sequence, "cancelled")
        else:
            is_late = isinstance(known, DeadlineExceededError)
            self.end(sequence, "timeout" if is_late else "error", to_message(known))

    def end(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """End a request between steps; one whose KV is being copied ends when the copy has (`end_copied`)."""
        if sequence.state is SequenceStatus.IMPORTING and sequence.fetch is not None:
            sequence.ending = sequence.ending or (reason, error)
            sequence.fetch.cancel()
        else:
            self.finish(sequence, reason, StepOutput(sequence.key), error=error)

    def end_copied(self, sequence: Sequence) -> bool:
        """Its copies have stopped: return whether it was to end with that, and end it."""
        sequence.fetch = None
        if sequence.ending is None:
            return False
        self.end(sequence, *sequence.ending)
        return True

    def finish(
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

    def hand_over(self, sequence: Sequence, delta: StepOutput) -> None:
        """End a context_only request whose blocks are kept for another engine."""
        assert self._parts.exporter is not None and delta.exported is not None
        self._forget(sequence)
        head = self._parts.exporter.export(sequence)
        delta.exported = msgspec.structs.replace(delta.exported, head=head)
        self._report(sequence, "not_finished", delta)

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        self.running.pop(sequence.key, None)
        self.preparing.discard(sequence.key)
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
        if sequence.spans is not None:
            delta.finish.spans = told(sequence, sequence.spans, self._parts.prompt_work, now)
        self._parts.accounts.finished(sequence, reason, error, now)
        self.outputs.append(delta)
