"""The KV blocks of one attention window: free, referenced, or cached until their room is needed.

Block 0 is the null block: never allocated, all zeros, the target of padding. A block with a hash and no reference is
*cached*; the least recently used one is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

NULL = 0


class BlockPool:
    """Blocks 1..num_blocks. Not thread-safe: the engine's thread owns it."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._on_evict = on_evict  # gets the public hash of the evicted block
        self._free = list(range(num_blocks, NULL, -1))  # a stack: a block used before is warm in memory
        self._references = [0] * (num_blocks + 1)
        self._hashes: dict[int, bytes] = {}
        self._event_hashes: dict[int, int] = {}
        self._blocks: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still return: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """Return a block with one reference and no hash. One must be available."""
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        return block

    def lookup(self, digest: bytes) -> int | None:
        """Return the block of this hash, referenced or cached. Changes nothing."""
        return self._blocks.get(digest)

    def share(self, block: int) -> None:
        """Add a reference to a block found by `lookup`."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def free(self, block: int) -> None:
        """Drop one reference; after the last one the block is cached (if it has a hash) or free."""
        self._references[block] -= 1
        assert self._references[block] >= 0, f"block {block} freed twice"
        if self._references[block]:
            return
        if block in self._hashes:
            self._cached[block] = None
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

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._blocks[self._hashes.pop(block)]
        event_hash = self._event_hashes.pop(block, None)
        if event_hash is not None and self._on_evict is not None:
            self._on_evict(event_hash)
        return block
