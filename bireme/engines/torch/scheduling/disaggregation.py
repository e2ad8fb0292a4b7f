"""The two ends of a KV transfer in this engine: rows that prefill leases out, rows that decode imports.

Transfers copy on threads of their own, and touch only rows that the engine leaves alone meanwhile; what they report is
posted to the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bireme.disagg import DisaggregatedParams
from bireme.engines.base import RequestKey
from bireme.engines.torch.pools.kv_store import KvStore
from bireme.engines.torch.step import Post, Sequence
from bireme.errors import BiremeError
from bireme.kv.blocks.block_manager import BlockManager
from bireme.kv.transfer.base import KvTransfer
from bireme.messages import TokenLogprobs, Usage


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

    def export(self, sequence: Sequence) -> None:
        """Make the rows of all its tokens readable and keep its blocks."""
        assert sequence.lease is not None
        self._manager.settle(sequence.table)
        self._pinned[sequence.number] = self._latest[sequence.key] = sequence
        sequence.lease.export(sequence.computed, self._store.token_rows(sequence.table.blocks, sequence.computed))

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


@dataclass(frozen=True, slots=True)
class TorchImporter:
    """Fetches the rows that a generation_only request does not find in our own pool."""

    transfer: KvTransfer
    manager: BlockManager
    store: KvStore
    post: Post

    def fetch(self, sequence: Sequence, done: Callable[[Sequence, BiremeError | None], None]) -> None:
        """Start it; `done` is posted when the last row has been written."""
        assert sequence.params is not None
        blocks, end = sequence.table.blocks, sequence.params.num_tokens
        firsts = [max(sequence.computed, self.manager.first_visible(group, end)) for group in range(len(blocks))]
        sequence.imported_from = firsts
        sequence.fetch = sequence.kv_fetch = self.transfer.fetch(
            sequence.params,
            firsts,
            self.store.token_rows(blocks, end),
            lambda error: self.post(partial(done, sequence, error)),
        )
