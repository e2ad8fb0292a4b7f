"""The KV blocks of one attention window in one tier: free, referenced, or cached until their room is needed.

Block 0 is the null block: never allocated, all zeros, the target of padding. A block with a hash and no reference is
*cached*. Evicted first is the lowest retention priority, within one the least recently used. A priority with a duration
falls back to the usual one when the block has been cached for so long (TensorRT-LLM's rules).

A *seen* block has what a drafting head made of all its tokens. Its hash says nothing of that.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NULL = 0
DEFAULT_PRIORITY = 35  # TensorRT-LLM's, of 0 to 100


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a cached block is kept in comparison with others."""

    priority: int = DEFAULT_PRIORITY
    duration_s: float | None = None  # from its last use on; None: for good


USUAL = Retention()


class BlockPool:
    """Blocks 1..num_blocks. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, bytes, int | None], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_evict` gets an evicted block, its digest and its public hash, when it can no longer be found."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._clock = clock
        self._free = list(range(num_blocks, NULL, -1))  # a stack: a block used before is warm in memory
        self._references = [0] * (num_blocks + 1)
        self._versions = [0] * (num_blocks + 1)
        self._hashes: dict[int, bytes] = {}
        self._event_hashes: dict[int, int] = {}
        self._blocks: dict[bytes, int] = {}
        self._retained: dict[int, Retention] = {}  # those that are not kept as usual
        self._cached: dict[int, OrderedDict[int, None]] = {}  # by priority, oldest first
        self._num_cached = 0
        self.num_changes = 0  # of what is cached
        self._seen: set[int] = set()
        self._expiries: dict[int, int] = {}  # cached block -> number of its entry in the heap
        self._due: list[tuple[float, int, int]] = []  # a heap: when, number, block
        self._numbers = itertools.count()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still return: free and cached ones."""
        return len(self._free) + self._num_cached

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self) -> int:
        """Return a block with one reference and no hash. One must be available."""
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        self._seen.discard(block)
        return block

    def lookup(self, digest: bytes) -> int | None:
        """Return the block of this hash, referenced or cached. Changes nothing."""
        return self._blocks.get(digest)

    def digest(self, block: int) -> bytes:
        return self._hashes[block]

    def event_hash(self, block: int) -> int | None:
        return self._event_hashes.get(block)

    def version(self, block: int) -> int:
        """Return a number that changes when the block's content is given up."""
        return self._versions[block]

    def is_seen(self, block: int) -> bool:
        return block in self._seen

    def set_seen(self, block: int, is_seen: bool = True) -> None:
        if is_seen:
            self._seen.add(block)
        else:
            self._seen.discard(block)

    def retention(self, block: int) -> Retention:
        return self._retained.get(block, USUAL)

    def share(self, block: int) -> None:
        """Add a reference to a block found by `lookup`."""
        if self._references[block] == 0:
            self._uncache(block)
        self._references[block] += 1

    def free(self, block: int) -> None:
        """Drop one reference; after the last one the block is cached (if it has a hash) or free."""
        self._references[block] -= 1
        assert self._references[block] >= 0, f"block {block} freed twice"
        if self._references[block]:
            return
        if block in self._hashes:
            self._cache(block)
        else:
            self._free.append(block)

    def commit(self, block: int, digest: bytes, event_hash: int | None) -> bool:
        """Give a full block its hash, so that others find it. False: it has one, or another block has this hash."""
        if digest in self._blocks or block in self._hashes:
            return False
        self._hashes[block] = digest
        self._blocks[digest] = block
        if event_hash is not None:
            self._event_hashes[block] = event_hash
        return True

    def retain(self, block: int, retention: Retention) -> None:
        """Say how a block is kept from its last reference on; one without a hash is not."""
        if block not in self._hashes:
            return
        is_cached = self._references[block] == 0
        if is_cached:
            self._uncache(block)
        if retention == USUAL:
            self._retained.pop(block, None)
        else:
            self._retained[block] = retention
        if is_cached:
            self._cache(block)

    def touch(self, block: int) -> None:
        """Count a cached block as just used."""
        if self._references[block] == 0:
            self._uncache(block)
            self._cache(block)

    def forget(self, block: int) -> None:
        """Give up the content of a block, referenced or cached: nobody finds it any more."""
        is_cached = self._references[block] == 0
        if is_cached:
            self._uncache(block)
        self._give_up(block)
        if is_cached:
            self._free.append(block)

    def eviction_order(self) -> Iterator[int]:
        """Yield the cached blocks, next to go first. They must stay as they are meanwhile."""
        self._expire()
        for priority in sorted(self._cached):
            yield from self._cached[priority]

    def _evict(self) -> int:
        block = next(self.eviction_order())
        self._uncache(block)
        self._give_up(block)
        return block

    def _give_up(self, block: int) -> None:
        digest, event_hash = self._hashes.pop(block), self._event_hashes.pop(block, None)
        del self._blocks[digest]
        self._versions[block] += 1
        if self._on_evict is not None:
            self._on_evict(block, digest, event_hash)
        self._retained.pop(block, None)

    def _cache(self, block: int) -> None:
        retention = self.retention(block)
        self._cached.setdefault(retention.priority, OrderedDict())[block] = None
        self._num_cached += 1
        self.num_changes += 1
        if retention.duration_s is not None:
            number = self._expiries[block] = next(self._numbers)
            heapq.heappush(self._due, (self._clock() + retention.duration_s, number, block))
            if len(self._due) > 64 and len(self._due) > 2 * len(self._expiries):
                self._due = [entry for entry in self._due if self._expiries.get(entry[2]) == entry[1]]
                heapq.heapify(self._due)

    def _uncache(self, block: int) -> None:
        priority = self.retention(block).priority
        level = self._cached[priority]
        del level[block]
        if not level:
            del self._cached[priority]
        self._num_cached -= 1
        self.num_changes += 1
        self._expiries.pop(block, None)

    def _expire(self) -> None:
        """Let those whose time has passed be kept as usual, as if they had just been used."""
        while self._due and self._due[0][0] <= self._clock():
            _, number, block = heapq.heappop(self._due)
            if self._expiries.get(block) == number:
                self._uncache(block)
                self._retained.pop(block, None)
                self._cache(block)
