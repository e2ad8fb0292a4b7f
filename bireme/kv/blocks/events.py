"""Events of KV blocks, for routers: recorded by the engine's thread, drained by any other.

The buffer is bounded: without a reader the oldest events are dropped, and the gap in the event ids shows it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

DEVICE, HOST, DISK = 0, 1, 2  # tiers: where a block lies


@dataclass(frozen=True, slots=True)
class StoredBlock:
    block_hash: int  # public 64-bit hash, see hashing.py
    tokens: tuple[int, ...]
    media: tuple[int, ...] = ()  # hashes of the pictures that it shows a part of


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks that can be reused from now on, in device memory."""

    event_id: int
    parent_hash: int | None  # of the first block; None: it begins a sequence
    blocks: tuple[StoredBlock, ...]
    lora_name: str = ""
    cache_salt: str = ""
    dp_rank: int = 0  # of an engine with attention data parallelism


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are held in no tier any more."""

    event_id: int
    block_hashes: tuple[int, ...]
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class BlocksMoved:
    """Blocks that lie in another tier from now on."""

    event_id: int
    block_hashes: tuple[int, ...]
    tier: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Events were lost: what readers know of this rank's blocks is invalid."""

    event_id: int
    dp_rank: int = 0


KvEvent = BlocksStored | BlocksRemoved | BlocksMoved | BlocksCleared


class EventBuffer:
    """At most `max_size` events, numbered from 0 without gaps as they are recorded."""

    def __init__(self, max_size: int) -> None:
        assert max_size > 0, "a buffer without room records nothing: leave it out"
        self._events: deque[KvEvent] = deque(maxlen=max_size)
        self._lock = threading.Lock()
        self._next_id = 0
        self.num_stored = 0  # blocks
        self.num_removed = 0
        self.num_moved = 0

    def stored(
        self, parent_hash: int | None, blocks: tuple[StoredBlock, ...], lora_name: str = "", cache_salt: str = ""
    ) -> None:
        with self._lock:
            self._events.append(BlocksStored(self._next_id, parent_hash, blocks, lora_name, cache_salt))
            self._next_id += 1
            self.num_stored += len(blocks)

    def removed(self, block_hash: int) -> None:
        with self._lock:
            self._events.append(BlocksRemoved(self._next_id, (block_hash,)))
            self._next_id += 1
            self.num_removed += 1

    def moved(self, block_hash: int, tier: int) -> None:
        with self._lock:
            self._events.append(BlocksMoved(self._next_id, (block_hash,), tier))
            self._next_id += 1
            self.num_moved += 1

    def drain(self) -> list[KvEvent]:
        """Return the buffered events, oldest first, and empty the buffer."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events
