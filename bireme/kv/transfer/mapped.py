"""Rows out of another process's memory, between engine processes of one host: one copy, and no file.

The importer maps the exporter's memory, once in its life, and copies the rows to its own: device to device by its GPU,
or on a CPU by the copier. They count when the exporter has said that it kept them until the importer's ack.

Where the importer can't map the memory, the rows go through files in /dev/shm from the next transfer on. So do rows
outside of what can be mapped.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from bireme.errors import BiremeError, ConfigError, RequestError, UnavailableError
from bireme.kv.transfer.backend import Backend, Inlet, PeerAddress, RowOutlet
from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.chunks import GPU_FACTOR, Chunk, TransferPlan
from bireme.kv.transfer.memory import MemoryKind, RowMemory, Rows, TokenRows, runs_of
from bireme.kv.transfer.shm import ShmBackend, ShmInlet
from bireme.kv.transfer.wire import MAX_MESSAGE_BYTES, Claim, Offer, RowSource, SharedMemory

logger = logging.getLogger("bireme.kv.transfer")


class MappedMemory(Protocol):
    """Another process's memory, mapped here. Used by the copier's thread."""

    def copy(self, group: int, source: Rows, target: Rows, ready: Any) -> None:
        """Start copying its rows to rows of this process's memory, when `ready` (TokenRows.ready) allows."""

    def wait(self) -> None:
        """Wait, without spinning, until the copies that were started have ended."""

    def close(self) -> None:
        """Wait, and let go of it: nobody has the memory back while somebody maps it."""


@runtime_checkable
class MappableMemory(RowMemory, Protocol):
    def shared(self) -> SharedMemory | None:
        """Return what others need to map it; None: it was not made for that. Raises ConfigError when they can't."""

    def map(self, shared: SharedMemory) -> MappedMemory:
        """Map another process's memory. Raises UnavailableError when this one can't."""


class MappedBackend(Backend):
    def __init__(self, kind: MemoryKind | None, staged: ShmBackend) -> None:
        """`kind`: of the memory that is mapped; None: of whatever kind it is."""
        self._kind = kind
        self._takes_any = kind is None
        self.name = "cuda_ipc" if kind is MemoryKind.VRAM else staged.name
        self._staged = staged  # for other memory, for peers that can't map ours, or whose memory we can't
        self.memory: MappableMemory | None = None
        self._shared: SharedMemory | None = None
        self._mapped: dict[str, tuple[SharedMemory, MappedMemory]] = {}  # by the exporter's endpoint
        self._out_of_reach: set[str] = set()
        self._num_needed = 0  # groups, of the model

    def start(self, layout: KvLayout, memory: RowMemory | None, limit_bytes: int) -> None:
        self._num_needed = len(layout.groups) - bool(layout.head)
        self._staged.start(layout, memory, limit_bytes)
        if memory is None:  # of no pool: each request's rows are its own
            return
        if self._takes_any:
            self._kind = memory.regions[0][0].kind
        is_ours = all(region.kind is self._kind for group in memory.regions for region in group)
        if self._kind is MemoryKind.VRAM and not is_ours:
            raise ConfigError(
                "cache_transceiver_config.backend: CUDA_IPC copies between GPUs, and this engine's KV lies in host"
                " memory; set DEFAULT (shared memory of one host)"
            )
        if is_ours and isinstance(memory, MappableMemory):
            self.memory, self._shared = memory, memory.shared()

    def is_shown(self, claim: Claim) -> bool:
        return claim.maps_memory and self._shared is not None

    def can_map(self, rows: TokenRows) -> bool:
        return self.memory is not None and rows.memory is self.memory

    def chunk_bytes(self, claim: Claim, usual: int) -> int:
        return usual * (GPU_FACTOR if self._kind is MemoryKind.VRAM and self.is_shown(claim) else 1)

    def open_outlet(self, plan: TransferPlan, claim: Claim) -> RowOutlet:
        if not self.is_shown(claim):
            return self._staged.open_outlet(plan, claim)
        assert self.memory is not None and self._shared is not None
        return MappedOutlet(self.memory, self._shared, plan)

    def open_inlet(self, plan: TransferPlan, peer: PeerAddress) -> Inlet:
        maps_memory = self.memory is not None and peer.endpoint not in self._out_of_reach
        return MappedInlet(self, plan, peer, self._staged.open_inlet(plan, peer), maps_memory)

    def map(self, endpoint: str, shared: SharedMemory) -> MappedMemory:
        """Return an exporter's memory. Runs on the copier. Raises UnavailableError."""
        assert self.memory is not None
        known, mapped = self._mapped.get(endpoint, (None, None))
        if mapped is not None and known == shared:
            return mapped
        self.forget_peer(endpoint)
        alike = shared.regions[: self.num_alike(shared)]
        _check(shared)
        try:
            found = self.memory.map(msgspec.structs.replace(shared, regions=alike))
        except UnavailableError as error:
            self._out_of_reach.add(endpoint)
            logger.warning("transfer event=staged peer=%s reason=its memory can't be mapped: %s", endpoint, error)
            raise UnavailableError(
                f"KV transfer: the exporter's memory can't be mapped: {error}; the next one takes the way through files"
            ) from error
        logger.info("transfer event=mapped peer=%s allocations=%d", endpoint, len(shared.handles))
        self._mapped[endpoint] = shared, found
        return found

    def forget_peer(self, endpoint: str) -> None:
        """Runs on the copier."""
        self._out_of_reach.discard(endpoint)
        if (known := self._mapped.pop(endpoint, None)) is not None:
            known[1].close()

    def tidy(self) -> None:
        self._staged.tidy()

    def close(self) -> None:
        for endpoint in list(self._mapped):
            self.forget_peer(endpoint)
        self._staged.close()

    def num_alike(self, shared: SharedMemory) -> int:
        """Return how many groups have rows as ours, from the first on: the model's all. Raises RequestError."""
        assert self.memory is not None
        ours, theirs = _row_bytes(self.memory), _row_bytes(shared)
        pairs = list(zip(ours, theirs, strict=False))
        count = next((at for at, (own, other) in enumerate(pairs) if own != other), len(pairs))
        if count < self._num_needed:
            raise RequestError(
                f"KV layout: tensors have rows of {theirs} bytes on prefill and {ours} on decode; serve the same model"
                " on both"
            )
        return count


def _check(shared: SharedMemory) -> None:
    """Refuse what would be read outside of the exporter's allocations: that would end this process, or its CUDA."""
    if not len(shared.handles) == len(shared.addresses) == len(shared.sizes):
        raise BiremeError("KV transfer: the offer's memory can't be read")
    for region in (region for group in shared.regions for region in group):
        if not region.lies_within(shared.sizes):
            raise BiremeError("KV transfer: the offer names a tensor that does not lie in the memory that it shares")


def _row_bytes(memory: RowMemory | SharedMemory) -> list[list[int]]:
    return [[region.row_bytes for region in group] for group in memory.regions]


class MappedOutlet(RowOutlet):
    def __init__(self, memory: MappableMemory, shared: SharedMemory, plan: TransferPlan) -> None:
        self._memory, self._shared, self._plan = memory, shared, plan

    def show(self, rows: TokenRows) -> RowSource:
        if rows.memory is not self._memory:
            raise BiremeError("KV transfer: these rows do not lie in the memory that is shared")
        self._memory.wait(rows.ready)
        runs = [
            b"".join(
                runs_of(rows.pick(chunk.group, chunk.first, chunk.last)).tobytes()
                for chunk in self._plan.chunks
                if chunk.group == group
            )
            for group in range(len(rows.rows))
        ]
        if sum(map(len, runs)) > MAX_MESSAGE_BYTES // 2:
            raise RequestError(
                f"KV transfer: the rows of {self._plan.num_tokens} tokens lie in too many pieces for one message; raise"
                " kv_cache_config.tokens_per_block, or send a shorter prompt"
            )
        return RowSource(self._shared, tuple(runs))

    def store(self, rows: TokenRows, chunk: Chunk) -> Generator[None, None, None]:
        """Not called: they are there."""
        yield from ()


class MappedInlet(Inlet):
    def __init__(
        self, backend: MappedBackend, plan: TransferPlan, peer: PeerAddress, staged: ShmInlet, maps_memory: bool
    ) -> None:
        self._backend, self._peer = backend, peer
        self.maps_memory = maps_memory
        # The first token of each group that is sent, and how many are.
        self._firsts = {chunk.group: chunk.first for chunk in reversed(plan.chunks)}
        self._lasts = {chunk.group: chunk.last for chunk in plan.chunks}
        self._file = staged
        self._mapped: MappedMemory | None = None
        self._source: list[Rows] = []

    def attach(self, offer: Offer) -> None:
        if offer.source is None:
            self._file.attach(offer)
            return
        if not self.maps_memory:
            raise BiremeError("KV transfer: the offer names memory that was not asked for")
        shared = offer.source.memory
        self._mapped, num_alike = self._backend.map(self._peer.endpoint, shared), self._backend.num_alike(shared)
        for group, (runs, regions) in enumerate(zip(offer.source.runs, shared.regions, strict=True)):
            num_rows = self._lasts.get(group, 0) - self._firsts.get(group, 0)
            if num_rows and group >= num_alike:
                raise RequestError(
                    "KV layout: rows of a head are not those of the head on decode; serve the same on both"
                )
            self._source.append(_rows_of(runs, num_rows, min((region.num_rows for region in regions), default=0)))

    def load(self, rows: TokenRows, chunk: Chunk) -> None:
        if self._mapped is None:
            self._file.load(rows, chunk)
            return
        if rows.memory is not self._backend.memory:
            raise BiremeError("KV transfer: these rows do not lie in the memory that rows are copied to")
        begin = self._firsts[chunk.group]
        source = self._source[chunk.group][chunk.first - begin : chunk.last - begin]
        self._mapped.copy(chunk.group, source, rows.pick(chunk.group, chunk.first, chunk.last), rows.ready)

    def wait(self) -> None:
        if self._mapped is not None:
            self._mapped.wait()

    def close(self) -> None:
        self._file.close()


def _rows_of(runs: bytes, num_rows: int, limit: int) -> Rows:
    """Return the rows of runs; what an exporter says is checked before an address is made of it."""
    try:
        pairs = np.frombuffer(runs, np.int64).reshape(-1, 2)
    except ValueError as error:
        raise BiremeError("KV transfer: the offer's rows can't be read") from error
    begins, counts = pairs[:, 0], pairs[:, 1]
    is_right = bool(
        (begins >= 0).all() and (counts > 0).all() and (counts <= limit).all() and (begins <= limit - counts).all()
    )
    if not is_right or int(counts.sum()) != num_rows:
        raise BiremeError(f"KV transfer: the offer names rows that are not {num_rows} of the {limit} shared ones")
    found: Rows = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(num_rows)
    return found
