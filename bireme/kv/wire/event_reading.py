"""KV event batches as a reader of many of them needs them: columns that the index takes in one call, no objects.

The plain form that engines write is read by compiled code, many messages at once; what is otherwise, and everything
where nothing is compiled, by the msgpack library, whose word on what is malformed counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bireme.kv.blocks.events import DEVICE, DISK
from bireme.kv.kernels.event_columns import CHANGES_END, CLEAR, END, FIRST, HASHES_END, KIND, REMOVE, SLOT, STORE
from bireme.kv.wire.event_wire import (
    TIERS_OF_MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    ReadEvent,
    StoredHashes,
    decode_batch,
)

MIN_EVENT_BYTES = 15  # a BlockRemoved without blocks


class BlockChanges(msgspec.Struct, frozen=True, gc=False):
    """rows[first:end], in this order: a kind, a tier, which of the hashes, from FIRST up to END, and a slot's.

    Who applies them has filled in the slot, and then no use for them any more.
    """

    rows: npt.NDArray[np.int64]  # [changes, 5]
    hashes: npt.NDArray[np.uint64]
    first: int
    end: int

    def of_slot(self, slot: int) -> BlockChanges:
        self.rows[self.first : self.end, SLOT] = slot
        return self

    def joined(self, later: BlockChanges) -> BlockChanges | None:
        """Return both as one; None: they do not lie together."""
        if later.rows is not self.rows or later.first != self.end:
            return None
        return BlockChanges(self.rows, self.hashes, self.first, later.end)


class ReadBatch(msgspec.Struct, frozen=True, gc=False):
    """An EventBatch as routers read it: without tokens and parents, which a match has no use for."""

    ts: float
    data_parallel_rank: int | None
    changes: BlockChanges

    @property
    def begins_anew(self) -> bool:
        """Whether the first of its events is AllBlocksCleared."""
        changes = self.changes
        return changes.first < changes.end and bool(changes.rows[changes.first, KIND] == CLEAR)

    def alone(self) -> ReadBatch:
        """Return one that keeps no memory of the batches that were read with it."""
        changes = self.changes
        if changes.end - changes.first == len(changes.rows):  # none was, or it waits again
            return self
        rows = changes.rows[changes.first : changes.end].copy()
        low, high = (int(rows[0, FIRST]), int(rows[-1, END])) if len(rows) else (0, 0)
        rows[:, FIRST : END + 1] -= low
        return ReadBatch(
            self.ts, self.data_parallel_rank, BlockChanges(rows, changes.hashes[low:high].copy(), 0, len(rows))
        )


def changes_of(events: Iterable[ReadEvent]) -> BlockChanges:
    rows: list[tuple[int, int, int, int, int]] = []
    hashes: list[int] = []
    for event in events:
        first = len(hashes)
        if isinstance(event, StoredHashes | BlockRemoved):
            hashes += event.block_hashes
            kind = STORE if isinstance(event, StoredHashes) else REMOVE
            rows.append((kind, TIERS_OF_MEDIA.get(event.medium or "GPU", DISK), first, len(hashes), 0))
        else:
            rows.append((CLEAR, DEVICE, first, first, 0))
    return BlockChanges(np.array(rows, np.int64).reshape(-1, 5), np.array(hashes, np.uint64), 0, len(rows))


def cleared() -> BlockChanges:
    return changes_of([AllBlocksCleared()])


class EventReader:
    """Used from one thread."""

    def __init__(self) -> None:
        from bireme.kv.kernels import compiling, event_kernels

        self._kernels: Any = event_kernels if compiling.IS_COMPILED else None
        self._changes = np.empty((0, 5), np.int64)
        self._hashes = np.empty(0, np.uint64)

    def read(self, payloads: Sequence[bytes]) -> list[ReadBatch | None]:
        """Return the batch of each payload; None: it is malformed."""
        if self._kernels is None or not payloads:
            return [read_batch(payload) for payload in payloads]
        data = np.frombuffer(b"".join(payloads), np.uint8)
        if len(data) > len(self._hashes):
            self._hashes = np.empty(2 * len(data), np.uint64)
            self._changes = np.empty((2 * len(data) // MIN_EVENT_BYTES + 1, 5), np.int64)
        batches = np.empty((len(payloads), 4), np.int64)
        times = np.empty(len(payloads), np.uint64)
        ends = np.cumsum([len(payload) for payload in payloads])
        self._kernels.read_batches(data, ends, batches, times, self._changes, self._hashes)
        rows = self._changes[: batches[-1, CHANGES_END]].copy()
        hashes = self._hashes[: batches[-1, HASHES_END]].copy()
        found: list[ReadBatch | None] = []
        first = 0
        read = zip(payloads, batches.tolist(), times.view(np.float64).tolist(), strict=True)
        for payload, (is_read, rank, end, _), ts in read:
            changes = BlockChanges(rows, hashes, first, end)
            found.append(ReadBatch(ts, rank if rank >= 0 else None, changes) if is_read else read_batch(payload))
            first = end
        return found


def read_batch(payload: bytes) -> ReadBatch | None:
    try:
        batch = decode_batch(payload)
    except (ValueError, RecursionError):  # text that is no UTF-8 is no DecodeError
        return None
    return ReadBatch(batch.ts, batch.data_parallel_rank, changes_of(batch.events))
