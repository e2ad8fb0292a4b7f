"""The workers of a stage with their load, as a router sees them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from bireme.config import BusyRule
from bireme.discovery.records import WorkerRecord, is_like
from bireme.kv.kernels.arrays import Floats, Hashes, Mask, Numbers
from bireme.kv.routing.active import ActiveRequests, SentRequest
from bireme.kv.routing.block_uses import BlockUses
from bireme.kv.routing.generations import weights_of
from bireme.kv.wire.event_wire import WorkerLoad

DEFAULT_TOKENS_PER_BLOCK = 32
DEFAULT_POOL_BLOCKS = 10_000.0  # of a worker that does not tell: all that matters is that they are alike
_EVIDENCE = 0.01  # of a pool: the turnover in the mean at which prices differ by half of what they differ later
_PRICED_AGAIN = 1.01  # when all pools together have turned over by so much more
_MAX_UNIT = 1e100
RETRY_S = 1.0  # after which a refused request may come again, where nothing better is known


class Target:
    """A worker, or one data-parallel rank of it."""

    def __init__(self, worker: str, dp_rank: int | None, record: WorkerRecord, uses: BlockUses | None) -> None:
        self.worker, self.dp_rank, self.record = worker, dp_rank, record
        self.generation: int | None = None  # while its stage has several
        self.index = -1  # in its stage's columns; -1: it has left
        self.active = ActiveRequests(uses)
        self.report: WorkerLoad | None = None  # the last one that was counted
        self.other_blocks = self.other_tokens = self.other_requests = 0.0
        self.turned_over = 0.0  # its pool, by what this router has sent; in its stage's unit

    @property
    def key(self) -> tuple[str, int]:
        return self.worker, self.dp_rank or 0

    def take_report(self, report: WorkerLoad | None) -> None:
        """Find what the worker has beyond this router's own: other routers' requests, leases, generated tokens.

        Called before anything of the own load changes, so that both figures are of one time. What is on its way to the
        worker is in the own figure alone: the difference is too small for a moment, and nothing counts twice. A rank
        has an equal share of its worker's report.
        """
        self.report = report
        if report is None:
            self.other_blocks = self.other_tokens = self.other_requests = 0.0
            return
        own, capacity = self.active, self.record.capacity
        share = 1.0 / capacity.attention_dp_size if capacity is not None else 1.0
        self.other_blocks = max(0.0, share * report.num_blocks_used - own.num_blocks)
        self.other_tokens = max(0.0, share * report.num_waiting_tokens - own.prompt_tokens)
        self.other_requests = max(0.0, share * (report.num_running + report.num_waiting) - own.num_requests)


class StageTargets:
    """Used on one loop. Load in columns: a decision over many workers is a few operations on arrays."""

    block_prices: Floats  # of a block that each would have to make room for; 1: its pool turns over as the mean does

    def __init__(
        self, loads: Mapping[str, WorkerLoad], uses: BlockUses | None = None, turnover_weight: float = 0.0
    ) -> None:
        """`uses`: where blocks of prompts are counted; None: they are not."""
        self._loads, self._uses = loads, uses
        self._turnover_weight = turnover_weight
        self._unit = 1.0  # of what has turned over
        self.targets: list[Target] = []
        self._resize()

    def set_workers(self, records: Mapping[str, WorkerRecord]) -> None:
        """Take the present workers; those that were there keep their load, unless theirs is another engine now."""
        known = {target.key: target for target in self.targets}
        targets: list[Target] = []
        for worker, record in records.items():
            num_ranks = record.capacity.attention_dp_size if record.capacity else 1
            for rank in range(num_ranks):
                target = known.get((worker, rank))
                if target is None or (target.record.life != record.life and target.record.life):
                    target = Target(worker, rank if num_ranks > 1 else None, record, self._uses)
                target.record = record
                targets.append(target)
        for target in self.targets:
            target.index = -1
        self.targets = targets
        self._resize()

    def _resize(self) -> None:
        count = len(self.targets)
        self.keys = [target.key for target in self.targets]
        self.workers = [target.worker for target in self.targets]
        # Workers of another block size are not let in.
        sizes = (target.record.tokens_per_block for target in self.targets)
        self.tokens_per_block = next(filter(None, sizes), DEFAULT_TOKENS_PER_BLOCK)
        self._take_generations()
        self.is_ready: Mask = np.array([not target.record.is_draining for target in self.targets], bool)
        self._users = np.array([target.active.user for target in self.targets], np.int64)
        self._computing_users = np.array([target.active.computing_user for target in self.targets], np.int64)
        self.blocks: Floats = np.zeros(count)  # in use
        self.other_blocks: Floats = np.zeros(count)  # of these, other routers', and what answers have filled
        self.requests: Floats = np.zeros(count)
        self._tokens: Floats = np.zeros(count)  # prompt tokens sent and not known to be computed
        self._first: Floats = np.zeros(count)  # of those, of the prompt that is being computed
        self._rates: Floats = np.zeros(count)
        self._began: Floats = np.zeros(count)
        self._pools = [float(_num_blocks(target)) or DEFAULT_POOL_BLOCKS for target in self.targets]
        self._price_blocks()
        for index, target in enumerate(self.targets):
            target.index = index
            self._show(target)

    def _take_generations(self) -> None:
        self.weights = weights_of(target.record for target in self.targets)
        has_several = len(self.weights) > 1
        for target in self.targets:
            target.generation = target.record.generation if has_several else None
        self.generations: Numbers | None = None  # of the targets; None: those that take requests have but one
        if has_several:
            self.generations = np.array([target.generation for target in self.targets], np.int32)

    def _show(self, target: Target) -> None:
        index, own = target.index, target.active
        if index < 0:
            return
        self.blocks[index] = own.num_blocks + target.other_blocks
        self.other_blocks[index] = target.other_blocks
        self.requests[index] = own.num_requests + target.other_requests
        self._tokens[index] = own.prefill_tokens + target.other_tokens
        self._first[index], self._rates[index], self._began[index] = own.first_tokens, own.rate, own.began_at

    def sync(self) -> None:
        """Count the reports that have come since."""
        loads = self._loads
        for target in self.targets:
            if (report := loads.get(target.worker)) is not target.report:
                target.take_report(report)
                self._show(target)

    def waiting_tokens(self, now: float) -> Floats:
        """Return the prompt tokens that are still to be computed, as far as can be told."""
        left: Floats = self._tokens - np.minimum(self._first, self._rates * (now - self._began))
        return left

    def shared_blocks(self, hashes: Hashes) -> Floats:
        """Return how many of a prompt's blocks requests of this router use already."""
        return self._uses.shared(self._users, hashes) if self._uses is not None else np.zeros(len(self.targets))

    def computing_blocks(self, hashes: Hashes, num_held: Floats) -> Floats:
        """Return how many of the blocks that each worker holds of a prompt are only being computed."""
        if self._uses is None:
            return np.zeros(len(self.targets))
        return self._uses.last(self._computing_users, hashes, num_held)

    def add(self, target: Target, sent: SentRequest, now: float) -> None:
        target.active.add(sent, now)
        self._show(target)
        if sent.num_new and len(self.targets) > 1:
            self._turn_over(target, sent.num_new)

    def _turn_over(self, target: Target, num_new: int) -> None:
        share = min(num_new / self._pools[target.index], 1.0)
        target.turned_over += self._unit * share
        self._all_turned_over += self._unit * share
        self._unit *= math.exp(share / len(self.targets))  # in place of all that is older getting less
        if self._all_turned_over > self._priced_until:
            self._price_blocks()

    def _price_blocks(self) -> None:
        """A pool that turns over twice as fast as the mean has 1 + turnover_weight, one that stands still 1 - that.

        By what this router has sent. What came before as many new blocks as all pools have counts a third, however long
        ago that is: prompts that come slowly fill a pool no less.
        """
        if self._unit > _MAX_UNIT:
            for target in self.targets:
                target.turned_over /= self._unit
            self._unit = 1.0
        turned_over: Floats = np.array([target.turned_over for target in self.targets], float)
        self._all_turned_over = float(turned_over.sum())
        self._priced_until = _PRICED_AGAIN * self._all_turned_over
        mean = self._all_turned_over / max(len(self.targets), 1)
        self.block_prices = 1.0 + self._turnover_weight * (turned_over - mean) / (mean + _EVIDENCE * self._unit)

    def prefilled(self, target: Target, sent: SentRequest, now: float) -> None:
        self._count_report(target)
        target.active.prefilled(sent, now)
        self._show(target)

    def free(self, target: Target, sent: SentRequest) -> None:
        self._count_report(target)
        target.active.free(sent)
        self._show(target)

    def _count_report(self, target: Target) -> None:
        if (report := self._loads.get(target.worker)) is not target.report and target.index >= 0:
            target.take_report(report)

    def allowed(self, skipped: Collection[str]) -> Mask:
        """Return those that take new requests and are not `skipped`."""
        if not skipped:
            return self.is_ready
        is_free: Mask = np.array([worker not in skipped for worker in self.workers], bool)
        return self.is_ready & is_free

    def is_like(self, revision: str) -> Mask:
        """Return which may go on with tokens of this revision."""
        return np.array([is_like(revision, target.record.revision) for target in self.targets], bool)

    def is_of(self, worker: str, rank: int | None = None) -> Mask:
        """Return which are a worker's, or one rank's of it; "" and None: any."""
        keys = zip(self.workers, self.keys, strict=True)
        return np.array([worker in ("", name) and rank in (None, key[1]) for name, key in keys], bool)

    def busy_s(self, rules: Sequence[BusyRule], now: float) -> Floats:
        """Return for how many seconds each stays beyond a bound of one of the rules; 0: it is within all.

        Prompts that wait go at the rate that was measured; when blocks become free nobody knows, so that is RETRY_S.
        """
        found: Floats = np.zeros(len(self.targets))
        for rule in rules:
            if rule.max_kv_usage is not None:
                totals = np.array([_num_blocks(target) or np.inf for target in self.targets])
                found[self.blocks > rule.max_kv_usage * totals] = RETRY_S
        for rule in rules:
            if rule.max_waiting_tokens is not None:
                excess = np.maximum(self.waiting_tokens(now) - rule.max_waiting_tokens, 0.0)
                unknown = np.where(excess > 0, RETRY_S, 0.0)
                found = np.maximum(found, np.divide(excess, self._rates, out=unknown, where=self._rates > 0))
        return found


def _num_blocks(target: Target) -> int:
    """Return the rank's blocks; 0: not known."""
    capacity = target.record.capacity
    num_blocks = target.report.num_blocks if target.report is not None else capacity.num_blocks if capacity else 0
    return num_blocks // (capacity.attention_dp_size if capacity else 1)
