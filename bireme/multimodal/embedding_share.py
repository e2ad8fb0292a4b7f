"""Embeddings on their way from the process that made them to the one that computes with them.

They use the leases, sockets and files of KV (kv/transfer): a row is one token's embedding, all in one group. In the
process that made them they are handed over without a copy. With a pool on both sides they are copied out of the one
into the other, and from there to where they are used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

import numpy as np

from bireme.disagg import DisaggregatedParams
from bireme.errors import BiremeError, EngineLostError, NotFoundError, UnavailableError
from bireme.kv.transfer.base import Fetch, GroupLayout, KvLayout, KvTransfer, Lease
from bireme.kv.transfer.memory import HostMemory, RowMemory, TokenRows
from bireme.metrics import Registry
from bireme.multimodal.wire import EmbeddingHandle, Grid

SUFFIX = "-mm"  # of a worker's name: its embeddings' transfer in discovery


class EmbeddingRows(Protocol):
    """One picture's embeddings, in the engine's own form; never changed."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def memory(self) -> HostMemory: ...


class SharedPool(Protocol):
    """Memory of this process that others map; see engines/torch/images/embedding_pool.py. From any thread."""

    @property
    def memory(self) -> RowMemory: ...

    def take(self, num_tokens: int) -> TokenRows | None: ...

    def put(self, embeddings: EmbeddingRows) -> TokenRows | None: ...

    def get(self, place: TokenRows) -> EmbeddingRows: ...

    def give_back(self, place: TokenRows) -> None: ...


Fetched = EmbeddingRows | bytearray  # made here, or the bytes of rows made elsewhere
Done = Callable[[Fetched | BiremeError], None]  # on any thread


def embedding_layout(model: str, dtype: str, row_bytes: int) -> KvLayout:
    """Return what both ends must agree on. `model` is the checkpoint's digest."""
    return KvLayout(f"embeddings:{model}", dtype, (GroupLayout(0, (row_bytes,)),))


class ShareMetrics(Registry):
    """The transfer's metrics under the share's own name, beside those of the worker's KV."""

    def __init__(self, metrics: Registry, name: str) -> None:
        super().__init__(name)
        self._metrics = metrics

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        self._metrics.add(name, amount, self.worker, *labels)

    def set(self, name: str, value: float, *labels: str) -> None:
        self._metrics.set(name, value, self.worker, *labels)

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        self._metrics.observe(name, value, self.worker, *labels, times=times)


class EmbeddingShare:
    """One an engine process, both ends of it. Thread-safe."""

    def __init__(self, transfer: KvTransfer, worker: str, life: int) -> None:
        """`worker`: the transfer's name in discovery."""
        self._transfer = transfer
        self._worker, self._life = worker, life
        self._lock = threading.Lock()
        self._offers: dict[int, tuple[Lease, EmbeddingRows]] = {}  # by lease id
        self._owned: dict[Hashable, set[int]] = {}  # lease ids of each encode request
        self._pool: SharedPool | None = None

    @property
    def endpoint(self) -> str:
        """Address for discovery, once started."""
        return self._transfer.endpoint

    def start(self, layout: KvLayout, pool: SharedPool | None = None) -> None:
        """Raises ConfigError when others can't map the pool."""
        self._row_bytes = layout.bytes_per_token
        self._pool = pool
        self._transfer.start(layout, pool.memory if pool is not None else None)

    def offer(self, owner: Hashable, rows: EmbeddingRows, media_hash: str, grid: Grid | None) -> EmbeddingHandle:
        """Lease rows to one fetch, until it ends, `abort`, or the lease expires."""
        ids: list[int] = []
        place = self._pool.put(rows) if self._pool is not None else None
        with self._lock:  # release can't come before the lease is known
            lease = self._transfer.reserve(lambda: self._released(owner, ids[0], place))
            ids.append(lease.lease_id)
            self._offers[lease.lease_id] = (lease, rows)
            self._owned.setdefault(owner, set()).add(lease.lease_id)
        lease.export(rows.num_tokens, rows.memory.token_rows() if place is None else place)
        return EmbeddingHandle(
            worker=self._worker,
            life=self._life,
            lease_id=lease.lease_id,
            generation=lease.generation,
            num_tokens=rows.num_tokens,
            hash=media_hash,
            grid=grid,
        )

    def abort(self, owner: Hashable) -> None:
        with self._lock:
            leases = [self._offers[number][0] for number in self._owned.get(owner, ()) if number in self._offers]
        for lease in leases:
            lease.abort()

    def release(self, handle: EmbeddingHandle) -> None:
        """End the lease behind a handle; harmless when it has ended."""
        with self._lock:
            lease, _ = self._offers.get(handle.lease_id, (None, None))
        if lease is not None and (lease.generation, handle.life) == (handle.generation, self._life):
            lease.abort()

    def fetch(self, handle: EmbeddingHandle, done: Done) -> Fetch | None:
        """Get the rows behind a handle: at once if they were made here (None), else through the transfer."""
        if (handle.worker, handle.life) == (self._worker, self._life):
            done(self._take(handle))
            return None
        params = DisaggregatedParams(
            worker=handle.worker,
            life=handle.life,
            lease_id=handle.lease_id,
            generation=handle.generation,
            num_tokens=handle.num_tokens,
        )
        pool = self._pool
        if pool is not None and (place := pool.take(handle.num_tokens)) is not None:
            return self._transfer.fetch(params, (0,), place, partial(_finish_in_pool, pool, place, done))
        buffer = bytearray(handle.num_tokens * self._row_bytes)
        memory = HostMemory([[np.frombuffer(buffer, np.uint8).reshape(-1, self._row_bytes)]])
        return self._transfer.fetch(params, (0,), memory.token_rows(), partial(_finish, buffer, done))

    def close(self) -> None:
        self._transfer.close()

    def _take(self, handle: EmbeddingHandle) -> Fetched | BiremeError:
        with self._lock:
            lease, rows = self._offers.pop(handle.lease_id, (None, None))
        if lease is None or rows is None or lease.generation != handle.generation:
            return EngineLostError("the embeddings of this request were used before or have expired; send it again")
        lease.abort()  # taken whole: nothing is left to fetch
        return rows

    def _released(self, owner: Hashable, lease_id: int, place: TokenRows | None) -> None:
        if place is not None and self._pool is not None:
            self._pool.give_back(place)
        with self._lock:
            self._offers.pop(lease_id, None)
            owned = self._owned.get(owner)
            if owned is not None:
                owned.discard(lease_id)
                if not owned:
                    del self._owned[owner]


def _finish_in_pool(pool: SharedPool, place: TokenRows, done: Done, error: BiremeError | None) -> None:
    try:
        found = pool.get(place) if error is None else None
    except Exception as failure:  # of the device's library
        error = BiremeError(f"images: their embeddings: {type(failure).__name__}: {failure}")
    pool.give_back(place)
    if error is None and found is not None:
        done(found)
    else:
        _finish(bytearray(), done, error)


def _finish(buffer: bytearray, done: Done, error: BiremeError | None) -> None:
    if error is None:
        done(buffer)
    elif isinstance(error, (NotFoundError, UnavailableError)):  # encoding them again helps
        done(EngineLostError("the embeddings of this request are gone; send it again"))
    else:
        done(error)
