"""The mocker's KV capacity: blocks counted as a real pool would, with a prefix cache, without bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Holding:
    """Blocks of one request: some shared by content, the rest its own."""

    shared: list[bytes] = field(default_factory=list)  # keys of referenced blocks, from the prompt's start
    num_private: int = 0


class MockBlockPool:
    """Owned by the engine's thread. The worst case is taken at admission, so no request loses blocks."""

    def __init__(self, num_blocks: int, tokens_per_block: int, is_reusing: bool) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._is_reusing = is_reusing
        self._references: dict[bytes, int] = {}  # by content; referenced blocks only
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # unreferenced, oldest first
        self._num_private = 0

    @property
    def num_used(self) -> int:
        return self._num_private + len(self._references)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def keys(self, prompt: bytes, salt: str) -> list[bytes]:
        """Return the chained content keys of the prompt's full blocks."""
        if not self._is_reusing:
            return []
        size, key, found = 4 * self.tokens_per_block, salt.encode(), []
        for end in range(size, len(prompt) + 1, size):
            key = hashlib.blake2b(key + prompt[end - size : end], digest_size=16).digest()
            found.append(key)
        return found

    def allocate(self, keys: list[bytes], num_tokens: int, max_hits: int) -> Holding | None:
        """Take blocks for `num_tokens`, the first ones by content where they are held; None: no room now."""
        hits = 0
        while hits < min(len(keys), max_hits) and (keys[hits] in self._references or keys[hits] in self._cached):
            hits += 1
        shared = keys[:hits]
        needed = self.blocks_for(num_tokens) - hits
        revived = sum(key in self._cached for key in shared)
        if self.num_used + revived + needed > self.num_blocks:
            return None
        for key in shared:
            self._cached.pop(key, None)
            self._references[key] = self._references.get(key, 0) + 1
        self._num_private += needed
        self._evict()
        return Holding(list(shared), needed)

    def publish(self, holding: Holding, keys: list[bytes]) -> None:
        """Offer computed prompt blocks to others; one that another request published first is shared."""
        for key in keys[len(holding.shared) :]:
            self._cached.pop(key, None)
            self._references[key] = self._references.get(key, 0) + 1
            self._num_private -= 1
            holding.num_private -= 1
            holding.shared.append(key)

    def free(self, holding: Holding) -> None:
        """Give everything back; blocks with known content stay for reuse, the prompt's start longest."""
        for key in reversed(holding.shared):
            self._references[key] -= 1
            if not self._references[key]:
                del self._references[key]
                self._cached[key] = None
        self._num_private -= holding.num_private
        holding.shared, holding.num_private = [], 0
        self._evict()

    def _evict(self) -> None:
        while self.num_used + len(self._cached) > self.num_blocks:
            self._cached.popitem(last=False)
