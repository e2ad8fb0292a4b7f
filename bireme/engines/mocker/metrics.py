"""The mocker's metrics: the same as a real engine's."""

from __future__ import annotations

import time

from bireme.engines.base import RequestKey
from bireme.engines.mocker.blocks import MockBlockPool
from bireme.engines.mocker.sequence import MockSequence
from bireme.messages import Finish
from bireme.metrics import Registry


class MockMetrics:
    """Used from the engine's thread alone."""

    def __init__(self, metrics: Registry) -> None:
        self._metrics = metrics
        self._num_rests = 0
        self._canaries: set[RequestKey] = set()  # that steps may have
        self._ended_canaries: set[RequestKey] = set()  # of these, with the step under way
        metrics.start("bireme_cancellations_total", "bireme_best_effort_rests_total")

    @property
    def has_canaries(self) -> bool:
        """Whether this step may have had one."""
        return bool(self._canaries)

    def admitted(self, one: MockSequence) -> None:
        if one.is_canary:
            self._canaries.add(one.key)
            return
        num_prompt = one.num_prompt - one.request.num_resumed
        self._metrics.observe("bireme_queue_seconds", one.admitted_at - one.arrived_at)
        self._metrics.observe("bireme_prompt_tokens", num_prompt)
        self._metrics.add("bireme_prompt_tokens_total", num_prompt)
        self._metrics.add("bireme_cached_prompt_tokens_total", one.num_cached)

    def delivered(self, one: MockSequence) -> None:
        if not (one.request.num_resumed or one.is_canary):
            self._metrics.observe("bireme_time_to_first_token_seconds", one.first_token_at - one.arrived_at)

    def finished(self, one: MockSequence, finish: Finish) -> None:
        outcome = finish.error.partition(":")[0] if finish.error else finish.reason
        self._metrics.count_end(outcome, time.monotonic() - one.arrived_at, one.is_canary)
        if one.is_canary:
            self._ended_canaries.add(one.key)
            return
        self._metrics.observe("bireme_completion_tokens", one.num_generated)
        if finish.reason == "cancelled":
            self._metrics.add("bireme_cancellations_total")

    def gaps(self, decoding: list[MockSequence], before: float, now: float) -> None:
        """Those in the step before, which ended at `before`, got one then, but for those that rest."""
        if self._canaries:
            decoding = self._without_canaries(decoding)
        last = [one.decode_at for one in decoding if one.decode_at > before and not one.is_best_effort]
        for one in decoding:
            if one.is_best_effort:
                last.append(one.stepped_at or one.decode_at)
                one.stepped_at = now
        if len(decoding) > len(last):
            self._metrics.observe("bireme_inter_token_latency_seconds", now - before, times=len(decoding) - len(last))
        for began in last:
            self._metrics.observe("bireme_inter_token_latency_seconds", now - began)

    def _without_canaries(self, decoding: list[MockSequence]) -> list[MockSequence]:
        self._canaries -= self._ended_canaries
        self._ended_canaries.clear()
        return [one for one in decoding if not one.is_canary]

    def stepped(self, seconds: float, num_tokens: int) -> None:
        self._metrics.observe("bireme_engine_step_seconds", seconds)
        self._metrics.add("bireme_generated_tokens_total", num_tokens)

    def levels(self, pool: MockBlockPool, num_rests: int = 0) -> None:
        if num_rests > self._num_rests:
            self._metrics.add("bireme_best_effort_rests_total", num_rests - self._num_rests)
            self._num_rests = num_rests
        self._metrics.set("bireme_kv_blocks_used", pool.num_used)
        self._metrics.set("bireme_kv_blocks_cached", pool.num_cached)
        self._metrics.set("bireme_kv_blocks_total", pool.num_blocks)
