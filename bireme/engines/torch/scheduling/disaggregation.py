"""The two ends of a KV transfer in this engine: rows that prefill leases out, rows that decode imports.

Transfers copy on threads of their own, and touch only rows that the engine leaves alone meanwhile; what they report is
posted to the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from bireme.disagg import DisaggregatedParams
from bireme.engines.base import RequestKey
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.scheduling.speculation.drafter import drafting_of
from bireme.engines.torch.scheduling.speculation.followers import GROUP, SeenBlocks
from bireme.engines.torch.step import Post, Sequence
from bireme.errors import BiremeError
from bireme.kv.blocks.block_manager import BlockManager
from bireme.kv.transfer.base import KvTransfer
from bireme.messages import TokenLogprobs, Usage
from bireme.metrics import Registry

logger = logging.getLogger("bireme.engines.torch")


class TorchExporter:
    """Leases of finished context_only requests; their blocks stay referenced until the transfer releases them."""

    def __init__(self, transfer: KvTransfer, manager: BlockManager, store: KvStore, post: Post) -> None:
        self._transfer = transfer
        self._manager = manager
        self._store = store
        self._post = post
        self._pinned: dict[int, Sequence] = {}  # by Sequence.number: a key may be used again after its request's end
        self._latest: dict[RequestKey, Sequence] = {}

    def reserve(self, sequence: Sequence) -> None:
        sequence.lease = self._transfer.reserve(lambda: self._post(partial(self._released, sequence)))
        sequence.lease.is_canary = sequence.is_canary

    def export(self, sequence: Sequence) -> str:
        """Make the rows of all its tokens readable and keep its blocks. Return the head whose rows are among them."""
        assert sequence.lease is not None
        self._manager.settle(sequence.table)
        self._pinned[sequence.number] = self._latest[sequence.key] = sequence
        sequence.lease.export(sequence.computed, self._store.token_rows(sequence.table.blocks, sequence.computed))
        follower = sequence.drafting.follower if sequence.drafting is not None else None
        has_seen_all = follower is not None and not follower.base and follower.num_verified == sequence.computed
        if sequence.drafting is not None:
            sequence.drafting.follower = None  # with what a head has made of its last place, which nobody draws from
        return self._store.head.identity if self._store.head is not None and has_seen_all else ""

    def abort(self, key: RequestKey) -> None:
        """End the lease of a finished request; unknown keys are ignored."""
        if (sequence := self._latest.get(key)) is not None and sequence.lease is not None:
            sequence.lease.abort()

    def params(
        self, sequence: Sequence, worker: str, life: int, token: int, logprobs: TokenLogprobs | None, usage: Usage
    ) -> DisaggregatedParams:
        assert sequence.lease is not None
        return DisaggregatedParams(
            worker=worker,
            life=life,
            lease_id=sequence.lease.lease_id,
            generation=sequence.lease.generation,
            num_tokens=sequence.computed,
            first_gen_tokens=(token,),
            first_gen_log_probs=(logprobs,) if logprobs is not None else None,
            ctx_request_id=sequence.key[1],
            is_canary=sequence.is_canary,
            prefill_ms=usage.prefill_ms,
            queue_ms=usage.queue_ms,
            cached_tokens=usage.cached_tokens,
        )

    def _released(self, sequence: Sequence) -> None:
        # A lease that ends before its export leaves the blocks to the request, which frees them itself.
        if self._pinned.pop(sequence.number, None) is not None:
            self._manager.release(sequence.table)
        if self._latest.get(sequence.key) is sequence:
            del self._latest[sequence.key]
        sequence.lease = None


class TorchImporter:
    """Fetches the rows that a generation_only request does not find in our own pool."""

    def __init__(
        self, transfer: KvTransfer, manager: BlockManager, store: KvStore, post: Post, metrics: Registry
    ) -> None:
        self._transfer, self._manager, self._store, self._post = transfer, manager, store, post
        self._metrics = metrics
        self._seen = SeenBlocks(manager.pools[GROUP], manager.tokens_per_block)
        self._without_head: set[str] = set()  # workers of which that was told
        if store.head is not None:
            for rows in ("whole", "missing"):
                metrics.start("bireme_head_imports_total", labels=(rows,))

    def fetch(self, sequence: Sequence, done: Callable[[Sequence, BiremeError | None], None]) -> None:
        """Start it; `done` is posted when the last row has been written."""
        assert sequence.params is not None
        blocks, end = sequence.table.blocks, sequence.params.num_tokens
        firsts = [max(sequence.computed, self._manager.first_visible(group, end)) for group in range(len(blocks))]
        sequence.imported_from, sequence.head_from = firsts, self._head_from(sequence, sequence.params)
        sequence.fetch = sequence.kv_fetch = self._transfer.fetch(
            sequence.params,
            firsts if sequence.head_from is None else [*firsts, sequence.head_from],
            self._store.token_rows(blocks, end),
            lambda error: self._post(partial(done, sequence, error)),
        )

    def _head_from(self, sequence: Sequence, params: DisaggregatedParams) -> int | None:
        """Return the first token of whose rows those of a head are fetched; None: they don't come, or none has use."""
        head = self._store.head
        if head is None or sequence.pictures is not None:
            return None
        is_there = params.head == head.identity
        if not params.is_canary:
            self._metrics.add("bireme_head_imports_total", 1, "whole" if is_there else "missing")
        if not is_there:
            if params.worker not in self._without_head:
                self._without_head.add(params.worker)
                why = "has another head" if params.head else "has no head, or has not seen the prompt with it"
                logger.warning("drafts_begin_late prefill=%s reason=it %s: fewer are right", params.worker, why)
            return None
        full = sequence.computed // self._manager.tokens_per_block
        return self._seen.num_seen(sequence.table.blocks[GROUP], full) * self._manager.tokens_per_block

    def arrived(self, sequence: Sequence) -> None:
        """All rows that were fetched have been written, up to those that are computed."""
        if sequence.head_from is not None:
            self._seen.remember(sequence.table.blocks[GROUP], sequence.head_from, sequence.computed)
            drafting_of(sequence).num_seen = sequence.computed
