"""KV that comes from elsewhere, prefill or a lower tier, and copies down. A request has no part in steps meanwhile."""

from __future__ import annotations

import time
from functools import partial

from bireme.engines.torch.scheduling.delivery import TokenDelivery
from bireme.engines.torch.scheduling.parts import Parts
from bireme.engines.torch.scheduling.requests import OpenRequests
from bireme.engines.torch.scheduling.scheduler import Scheduler
from bireme.engines.torch.step import SchedulerOutput, Sequence, SequenceStatus
from bireme.errors import BiremeError
from bireme.kv.blocks.block_tiers import BlockCopy, CopyResult


class Arrivals:
    def __init__(self, parts: Parts, scheduler: Scheduler, requests: OpenRequests, delivery: TokenDelivery) -> None:
        self._parts, self._scheduler, self._requests, self._delivery = parts, scheduler, requests, delivery

    def start(self, plan: SchedulerOutput, now: float) -> None:
        """Let the KV come of those that were admitted without a part in the step."""
        for sequence in plan.imports:
            self._import(sequence, now)
        for sequence, copies in plan.onboards:
            self._onboard(sequence, copies)

    def _import(self, sequence: Sequence, now: float) -> None:
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
            self._delivery.begin(sequence, (token,))
            self._delivery.accept(sequence, token, logprobs[0] if logprobs else None, now)
        except Exception as error:
            self._requests.fail(sequence, error)

    def _imported(self, sequence: Sequence, error: BiremeError | None) -> None:
        """All rows have been written, or the import has failed."""
        if sequence.state is not SequenceStatus.IMPORTING or self._requests.end_copied(sequence):
            return
        if error is not None:
            self._requests.fail(sequence, error)
            return
        try:  # all rows before its first token are there: it takes part in steps
            sequence.state, sequence.imported_at = SequenceStatus.RUNNING, time.monotonic()
            sequence.computed = len(sequence.tokens) - 1
            self._parts.manager.commit(sequence.table, sequence.tokens, sequence.computed, sequence.imported_from)
            assert self._parts.importer is not None
            self._parts.importer.arrived(sequence)
        except Exception as failure:
            self._requests.fail(sequence, failure)

    def _onboard(self, sequence: Sequence, copies: list[BlockCopy]) -> None:
        """Let the blocks that lower tiers have come to the device."""
        mover, post = self._parts.mover, self._parts.post
        assert mover is not None
        sequence.fetch = mover.onboard(
            copies, lambda copies, results: post(partial(self._onboarded, sequence, copies, results))
        )

    def _onboarded(self, sequence: Sequence, copies: list[BlockCopy], results: list[CopyResult]) -> None:
        self._parts.manager.onboarded(sequence.table, copies, results)
        self._scheduler.waiting.unpark()
        if self._requests.end_copied(sequence):
            return
        if any(result is not CopyResult.DONE for result in results):
            self._scheduler.requeue(sequence)  # what could not be read is computed
            return
        self._scheduler.found(sequence)
        if sequence.params is not None and not sequence.is_sampling:
            self._import(sequence, time.monotonic())
        else:
            sequence.state = SequenceStatus.RUNNING

    def note_computed(self) -> None:
        """Copies down wait for what the device has been given so far."""
        if self._parts.mover is not None:
            self._parts.mover.note_computed()

    def offload(self) -> None:
        """Start the copies of blocks that may be evicted soon."""
        mover, post, tiers = self._parts.mover, self._parts.post, self._parts.manager.tiers
        if mover is not None and (copies := tiers.offload()):
            mover.offload(copies, lambda copies, results: post(partial(tiers.offloaded, copies, results)))
