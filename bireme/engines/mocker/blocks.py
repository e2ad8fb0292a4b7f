"""The mocker's KV capacity: blocks counted as a real pool would, with a prefix cache, without bytes.

Blocks are known by their content: the prompt's, and those that an answer has filled. The least recently used go first.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import xxhash

from bireme.kv import hashing
from bireme.kv.events import EventBuffer, StoredBlock


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a request's blocks hold, as far as it is known, and whose they are."""

    tokens: bytes  # int32 little endian
    keys: list[bytes]  # of the full blocks, chained
    lora_name: str = ""
    cache_salt: str = ""


@dataclass(slots=True)
class Holding:
    """Blocks of one request: some shared by content, the rest its own."""

    shared: list[bytes] = field(default_factory=list)  # keys of referenced blocks, from the prompt's start
    num_private: int = 0
    computing: list[bytes] = field(default_factory=list)  # keys of blocks that will be known by their content


class MockBlockPool:
    """Owned by the engine's thread. The worst case is taken at admission, so no request loses blocks."""

    def __init__(
        self, num_blocks: int, tokens_per_block: int, is_reusing: bool, events: EventBuffer | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.is_reusing = is_reusing
        self._references: dict[bytes, int] = {}  # by content; referenced blocks only
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # unreferenced, oldest first
        self._num_private = 0
        self._computing: Counter[bytes] = Counter()
        self._events = events
        self._event_hashes: dict[bytes, int] = {}  # of all blocks that are known by their content

    @property
    def num_used(self) -> int:
        return self._num_private + len(self._references)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def content(
        self, tokens: bytes, lora_name: str, cache_salt: str, known: BlockContent | None = None
    ) -> BlockContent:
        """Return the content of blocks with these tokens. `known`: of a part of them, from the start."""
        keys = list(known.keys) if known is not None else []
        if self.is_reusing:
            size = 4 * self.tokens_per_block
            key = keys[-1] if keys else f"{cache_salt}\0{lora_name}".encode()
            for end in range(size * (len(keys) + 1), len(tokens) + 1, size):
                key = xxhash.xxh3_128_digest(key + tokens[end - size : end])
                keys.append(key)
        return BlockContent(tokens, keys, lora_name, cache_salt)

    def is_computing(self, keys: list[bytes], max_hits: int) -> bool:
        """Return whether the first block that is not held is being computed: its prompt need not be computed twice."""
        if not self._computing:
            return False
        keys = keys[:max_hits]
        missing = next((key for key in keys if key not in self._references and key not in self._cached), None)
        return missing in self._computing

    def begin(self, holding: Holding, content: BlockContent) -> None:
        """The prompt's blocks that are not shared are being computed, until `publish` or `free`."""
        holding.computing = content.keys[len(holding.shared) :]
        self._computing.update(holding.computing)

    def _computed(self, holding: Holding) -> None:
        for key in holding.computing:
            self._computing[key] -= 1
            if not self._computing[key]:
                del self._computing[key]
        holding.computing = []

    def allocate(self, keys: list[bytes], num_tokens: int, max_hits: int) -> Holding | None:
        """Take blocks for `num_tokens`, the first ones by content where they are held; None: no room now."""
        references, cached = self._references, self._cached
        shared = list(itertools.takewhile(lambda key: key in references or key in cached, keys[:max_hits]))
        needed = self.blocks_for(num_tokens) - len(shared)
        revived = [key for key in shared if key in cached]
        if self.num_used + len(revived) + needed > self.num_blocks:
            return None
        for key in revived:
            del cached[key]
        for key in shared:
            references[key] = references.get(key, 0) + 1
        self._num_private += needed
        self._evict()
        return Holding(shared, needed)

    def publish(self, holding: Holding, content: BlockContent) -> None:
        """Offer computed blocks to others; one that another request published first is shared."""
        self._computed(holding)
        first = len(holding.shared)
        if self._events is not None:
            self._record(content, first)
        for key in content.keys[first:]:
            self._cached.pop(key, None)
            self._references[key] = self._references.get(key, 0) + 1
            self._num_private -= 1
            holding.num_private -= 1
            holding.shared.append(key)

    def free(self, holding: Holding) -> None:
        """Give everything back; blocks with known content stay for reuse, the prompt's start longest."""
        self._computed(holding)
        references, cached = self._references, self._cached
        for key in reversed(holding.shared):
            if (count := references[key]) > 1:
                references[key] = count - 1
            else:
                del references[key]
                cached[key] = None
        self._num_private -= holding.num_private
        holding.shared, holding.num_private = [], 0
        self._evict()

    def _evict(self) -> None:
        while self.num_used + len(self._cached) > self.num_blocks:
            key, _ = self._cached.popitem(last=False)
            if self._events is not None:
                self._events.removed(self._event_hashes.pop(key))

    def _record(self, content: BlockContent, first: int) -> None:
        """Tell of blocks from `first` on that nobody holds yet, in runs of consecutive ones."""
        assert self._events is not None
        size, seed = 4 * self.tokens_per_block, hashing.event_seed(content.lora_name, content.cache_salt)
        parent = self._event_hashes[content.keys[first - 1]] if first else None
        begin, run = parent, list[StoredBlock]()
        for at in range(first, len(content.keys)):
            event_hash = self._event_hashes.get(content.keys[at])
            if event_hash is None:
                raw = content.tokens[at * size : (at + 1) * size]
                event_hash = hashing.sequence_hash(parent, hashing.local_hash(raw, seed))
                self._event_hashes[content.keys[at]] = event_hash
                run.append(StoredBlock(event_hash, tuple(memoryview(raw).cast("i"))))
            elif run:
                self._events.stored(begin, tuple(run), content.lora_name, content.cache_salt)
                run = []
            parent = event_hash
            begin = begin if run else parent
        if run:
            self._events.stored(begin, tuple(run), content.lora_name, content.cache_salt)
