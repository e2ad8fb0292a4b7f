"""Accounts: the usage that ends each request, and the engine's metrics.

`prompt_tokens` leaves resumed tokens out and `completion_tokens` counts them; the token that ended a request is in
neither, because it is not delivered.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from bireme.engines.torch.scheduling.scheduler import Scheduler
from bireme.engines.torch.step import Sequence
from bireme.kv.blocks.block_manager import BlockManager
from bireme.kv.blocks.block_tiers import BlockTiers
from bireme.kv.blocks.events import DEVICE, DISK, HOST
from bireme.messages import FinishReason, Usage
from bireme.metrics import Registry

_LEVELS = ("bireme_requests_running", "bireme_requests_waiting", "bireme_kv_blocks_used", "bireme_kv_blocks_cached")
_TIERS = {DEVICE: "device", HOST: "host", DISK: "disk"}
_COUNTERS = ("bireme_cancellations_total", "bireme_preemptions_total", "bireme_best_effort_rests_total")
_TIER_COUNTERS = tuple(
    f"bireme_kv_{name}_total"
    for name in ("offloaded_blocks", "offloaded_bytes", "onboarded_blocks", "onboarded_bytes", "offload_missed_blocks",
                 "tier_failures")
)  # fmt: skip
_MOST_STEPS_UNTOLD = 64
_RECENT_PROMPTS = 1000  # of KVBM's hit rates as well


class TorchMetrics:
    def __init__(self, metrics: Registry, worker: str, block_bytes: Iterable[int] = ()) -> None:
        """`block_bytes`: of a block of each group."""
        self._metrics = metrics
        self._worker = worker
        self._block_bytes = tuple(block_bytes)
        self._num_events = (0, 0, 0)
        self._recent: deque[Counter[int | None]] = deque()  # prompts' tokens by tier; None: all
        self._recent_tokens: Counter[int | None] = Counter()  # their sum
        self._tier_counts: dict[str, Counter[tuple[int, int]]] = {}
        self._num_preemptions = self._num_rests = 0
        self._levels = (-1, -1, -1, -1)  # of the gauges
        self._path, self._num_steps = "", 0  # of the last steps, in a row: they are counted together
        self._lowest_tier = DEVICE
        self.num_canary_tokens = 0  # of the step under way; its other tokens are load
        self._gaps: Counter[float] = Counter()  # seconds between deliveries -> streams, of the step under way

    def scheduled(self, sequence: Sequence, now: float) -> None:
        if sequence.scheduled_at:
            return
        sequence.scheduled_at = now
        if sequence.is_canary:
            return
        self._metrics.observe("bireme_queue_seconds", now - sequence.arrived_at)
        self._metrics.observe("bireme_prompt_tokens", sequence.num_prompt)
        self._metrics.add("bireme_prompt_tokens_total", sequence.num_prompt)
        self._metrics.add("bireme_cached_prompt_tokens_total", max(0, sequence.num_cached))
        self._matched(sequence)

    def _matched(self, sequence: Sequence) -> None:
        self._recent.append(Counter({None: sequence.num_prompt} | sequence.num_matched))
        self._recent_tokens += self._recent[-1]
        if len(self._recent) > _RECENT_PROMPTS:
            self._recent_tokens -= self._recent.popleft()
        for tier, num_tokens in sequence.num_matched.items():
            self._metrics.add("bireme_kv_matched_tokens_total", num_tokens, _TIERS[tier])
        for tier, name in _TIERS.items():
            if tier <= self._lowest_tier:
                rate = self._recent_tokens[tier] / self._recent_tokens[None]
                self._metrics.set("bireme_kv_hit_rate", rate, name)

    def first_token(self, sequence: Sequence, now: float) -> None:
        sequence.first_token_at = now
        if not (sequence.request.num_resumed or sequence.is_canary):
            self._metrics.observe("bireme_time_to_first_token_seconds", now - sequence.arrived_at)

    def finished(self, sequence: Sequence, reason: FinishReason, error: str, now: float) -> None:
        outcome = error.partition(":")[0] if error else reason
        self._metrics.count_end(outcome, now - sequence.arrived_at, sequence.is_canary)
        if sequence.is_canary:
            return
        self._metrics.observe("bireme_completion_tokens", sequence.num_output)
        if reason == "cancelled":
            self._metrics.add("bireme_cancellations_total")

    def delivered(self, sequence: Sequence, now: float, count: int = 1) -> None:
        """So many tokens come at once; most of a step's have the same gap to the one before."""
        if sequence.last_token_at:
            self._gaps[now - sequence.last_token_at] += 1
        if count > 1:
            self._gaps[0.0] += count - 1

    def stepped(self, path: str, seconds: float, num_tokens: int) -> None:
        for gap_s, count in self._gaps.items():
            self._metrics.observe("bireme_inter_token_latency_seconds", gap_s, times=count)
        self._gaps.clear()
        self._metrics.observe("bireme_engine_step_seconds", seconds)
        if path is not self._path or self._num_steps == _MOST_STEPS_UNTOLD:
            self._count_steps()
            self._path = path
        self._num_steps += 1
        self._metrics.add("bireme_generated_tokens_total", num_tokens - self.num_canary_tokens)
        self.num_canary_tokens = 0

    def levels(self, manager: BlockManager, scheduler: Scheduler) -> None:
        """Set the gauges; called once a step and when the engine becomes idle."""
        num_preemptions, num_rests = scheduler.num_preemptions, scheduler.best_effort.num_rests
        levels = (len(scheduler.running), len(scheduler.waiting), manager.num_referenced, manager.num_cached)
        if levels != self._levels:  # most steps change none
            for name, value in zip(_LEVELS, levels, strict=True):
                self._metrics.set(name, value)
            self._levels = levels
            self._count_steps()  # so none is left when a request ends
        if num_preemptions > self._num_preemptions:
            self._metrics.add("bireme_preemptions_total", num_preemptions - self._num_preemptions)
            self._num_preemptions = num_preemptions
        if num_rests > self._num_rests:
            self._metrics.add("bireme_best_effort_rests_total", num_rests - self._num_rests)
            self._num_rests = num_rests
        if manager.events is not None:
            events = manager.events
            self._count_events((events.num_stored, events.num_removed, events.num_moved))
        if len(manager.tiers.pools) > 1:
            self._count_tiers(manager.tiers)

    def started(self, manager: BlockManager, scheduler: Scheduler, load_s: float) -> None:
        self._metrics.set("bireme_kv_blocks_total", manager.num_blocks)
        self._metrics.set("bireme_engine_load_seconds", load_s)
        self._lowest_tier = len(manager.tiers.pools) - 1
        for tier, pools in enumerate(manager.tiers.pools[HOST:], HOST):
            self._metrics.set("bireme_kv_tier_capacity_blocks", sum(pool.num_blocks for pool in pools), _TIERS[tier])
            self._metrics.start(*_TIER_COUNTERS, labels=(_TIERS[tier],))
        self._metrics.start(*_COUNTERS)
        self.levels(manager, scheduler)

    def usage(self, sequence: Sequence, now: float) -> Usage:
        params, kind = sequence.params, sequence.request.request_type
        begun = sequence.scheduled_at or now
        computing = sequence.imported_at or begun
        first = sequence.first_token_at
        usage = Usage(
            prompt_tokens=sequence.num_prompt,
            cached_tokens=max(0, sequence.num_cached),
            completion_tokens=sequence.num_output,
            queue_ms=1e3 * (begun - sequence.arrived_at),
            prefill_ms=1e3 * ((first or now) - computing),
            decode_ms=1e3 * (now - max(first, sequence.imported_at)) if first else 0.0,
            prefill_worker=self._worker,
            decode_worker="" if kind == "context_only" else self._worker,
        )
        if sequence.drafting is not None:
            usage.drafted_tokens = sequence.drafting.num_drafted
            usage.accepted_tokens = sequence.drafting.num_accepted
        if params is not None:
            usage.prefill_worker, usage.prefill_ms = params.worker, params.prefill_ms
            usage.queue_ms += params.queue_ms
            usage.cached_tokens = params.cached_tokens
            usage.transfer_ms = 1e3 * ((sequence.imported_at or now) - begun)
        return usage

    def _count_steps(self) -> None:
        if self._num_steps:
            self._metrics.add("bireme_engine_steps_total", self._num_steps, self._path)
            self._num_steps = 0

    def _count_events(self, counts: tuple[int, int, int]) -> None:
        for kind, before, count in zip(("stored", "removed", "updated"), self._num_events, counts, strict=True):
            if count > before:
                self._metrics.add("bireme_kv_events_total", count - before, kind)
        self._num_events = counts

    def _count_tiers(self, tiers: BlockTiers) -> None:
        metrics, counts = self._metrics, tiers.counts
        for tier, pools in enumerate(tiers.pools[HOST:], HOST):
            metrics.set("bireme_kv_tier_blocks", sum(pool.num_cached for pool in pools), _TIERS[tier])
        for name, now in (
            ("offloaded_blocks", counts.offloaded),
            ("onboarded_blocks", counts.onboarded),
            ("offload_missed_blocks", counts.missed),
            ("tier_failures", counts.failed),
        ):
            before = self._tier_counts.get(name)
            if now == before:
                continue
            self._tier_counts[name] = now.copy()
            for (tier, group), count in (now - (before or Counter())).items():
                metrics.add(f"bireme_kv_{name}_total", count, _TIERS[tier])
                if name in ("offloaded_blocks", "onboarded_blocks"):
                    num_bytes = count * self._block_bytes[group]
                    metrics.add(f"bireme_kv_{name.replace('blocks', 'bytes')}_total", num_bytes, _TIERS[tier])
