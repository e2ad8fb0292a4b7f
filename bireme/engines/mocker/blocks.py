"""The mocker's KV capacity: blocks counted as a real pool would, with a prefix cache, without bytes.

Blocks are known by their content: the prompt's, and those that an answer has filled. The least recently used go first.
A block that is held has all before it held too, in use or not, so a prompt's blocks are not looked at one by one. Of
60,000 tokens that would cost a request more than all else that the mocker does for it. For the same reason the blocks
of the last request that ran are taken out of use when the next one has taken its own, as a rule nearly the same.
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import numpy as np
import xxhash

from bireme.kv.blocks import hashing
from bireme.kv.blocks.events import EventBuffer, StoredBlock

_LONG_BLOCKS, _NUM_RECENT = 32, 16  # prompts of so many blocks are remembered, and so many of them


@dataclass(frozen=True, slots=True)
class BlockContent:
    """As far as it is known."""

    tokens: bytes  # int32 little endian
    keys: list[bytes]  # of the full blocks, chained
    lora_name: str = ""
    cache_salt: str = ""


@dataclass(slots=True)
class Holding:
    """Blocks of one request: some shared by content, the rest its own."""

    keys: list[bytes] = field(default_factory=list)  # of its full blocks, from the prompt's start
    num_shared: int = 0  # of these the first: in use by content
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
        # Blocks in use, by content: how many requests' last shared block each is, and how many of the blocks that
        # follow it are in use.
        self._uses: dict[bytes, int] = {}
        self._num_sharing = 0  # requests with blocks in use by content
        self._last: tuple[list[bytes], int] | None = None  # when there are none: what `_uses` still has, to be left
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # not in use, oldest first
        self._recent: OrderedDict[bytes, BlockContent] = OrderedDict()  # long prompts, by their first block
        self._num_private = 0
        self._computing: Counter[bytes] = Counter()
        self._events = events
        self._event_hashes: dict[bytes, int] = {}  # of all blocks that are known by their content

    @property
    def num_used(self) -> int:
        return self._num_private + (0 if self._last else len(self._uses))

    @property
    def num_cached(self) -> int:
        return len(self._cached) + (len(self._uses) if self._last else 0)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def content(
        self, tokens: bytes, lora_name: str, cache_salt: str, known: BlockContent | None = None
    ) -> BlockContent:
        """`known`: of a part of them, from the start."""
        if not self.is_reusing:
            return BlockContent(tokens, [], lora_name, cache_salt)
        size, root = 4 * self.tokens_per_block, f"{cache_salt}\0{lora_name}".encode()
        keys = list(known.keys) if known is not None else []
        is_long = len(tokens) >= size * _LONG_BLOCKS
        if is_long and not keys:
            keys = [xxhash.xxh3_128_digest(root + tokens[:size])]
            if (recent := self._recent.get(keys[0])) is not None:
                keys = recent.keys[: _num_equal(tokens, recent.tokens) // size]
        key = keys[-1] if keys else root
        for end in range(size * (len(keys) + 1), len(tokens) + 1, size):
            key = xxhash.xxh3_128_digest(key + tokens[end - size : end])
            keys.append(key)
        content = BlockContent(tokens, keys, lora_name, cache_salt)
        if is_long:
            self._recent[keys[0]] = content
            self._recent.move_to_end(keys[0])
            if len(self._recent) > _NUM_RECENT:
                self._recent.popitem(last=False)
        return content

    def is_computing(self, keys: list[bytes], max_hits: int) -> bool:
        """Then its prompt need not be computed twice."""
        if not self._computing:
            return False
        num_held = self._num_held(keys, max_hits)
        return num_held < min(len(keys), max_hits) and keys[num_held] in self._computing

    def begin(self, holding: Holding, content: BlockContent) -> None:
        """Until `publish` or `free`."""
        holding.computing = content.keys[holding.num_shared :]
        self._computing.update(holding.computing)

    def _computed(self, holding: Holding) -> None:
        for key in holding.computing:
            self._computing[key] -= 1
            if not self._computing[key]:
                del self._computing[key]
        holding.computing = []

    def allocate(self, keys: list[bytes], num_tokens: int, max_hits: int) -> Holding | None:
        """The first ones by content where they are held; None: no room now."""
        uses = self._uses
        num_shared = self._num_held(keys, max_hits)
        num_revived = num_shared
        if self._last is None:
            num_revived -= bisect.bisect_left(keys, True, 0, num_shared, key=lambda key: key not in uses)
        needed = self.blocks_for(num_tokens) - num_shared
        if self.num_used + num_revived + needed > self.num_blocks:
            return None
        self._use(keys, num_shared)
        self._num_sharing += num_shared > 0
        self._num_private += needed
        self._evict()
        return Holding(keys, num_shared, needed)

    def publish(self, holding: Holding, content: BlockContent) -> None:
        """One that another request published first is shared."""
        self._computed(holding)
        first, keys = holding.num_shared, content.keys
        if self._events is not None:
            self._record(content, first)
        if len(keys) > first:
            self._use(keys, len(keys))
            self._leave(holding.keys, first)
            self._num_sharing += not first
            self._num_private -= len(keys) - first
            holding.num_private -= len(keys) - first
            holding.keys, holding.num_shared = keys, len(keys)

    def free(self, holding: Holding) -> None:
        """Known content stays for reuse, the prompt's start longest."""
        self._computed(holding)
        self._num_sharing -= holding.num_shared > 0
        if self._num_sharing:
            self._leave(holding.keys, holding.num_shared)
        elif holding.num_shared:
            self._last = (holding.keys, holding.num_shared)
        self._num_private -= holding.num_private
        holding.num_shared = holding.num_private = 0

    def _num_held(self, keys: list[bytes], limit: int) -> int:
        """Before the first that is not held."""
        uses, cached = self._uses, self._cached
        return bisect.bisect_left(
            keys, True, 0, min(len(keys), limit), key=lambda key: key not in uses and key not in cached
        )

    def _use(self, keys: list[bytes], count: int) -> None:
        """From the last to the first that is in use already."""
        for at in range(count - 1, -1, -1):
            key = keys[at]
            self._uses[key] = num_uses = self._uses.get(key, 0) + 1
            if num_uses > 1:
                break
            self._cached.pop(key, None)
        if self._last is not None:
            last, self._last = self._last, None
            self._leave(*last)

    def _leave(self, keys: list[bytes], count: int) -> None:
        """Undo `_use`."""
        for at in range(count - 1, -1, -1):
            key = keys[at]
            if self._uses[key] > 1:
                self._uses[key] -= 1
                return
            del self._uses[key]
            self._cached[key] = None

    def _evict(self) -> None:
        while self.num_used + len(self._cached) > self.num_blocks:
            key, _ = self._cached.popitem(last=False)
            if self._events is not None:
                self._events.removed(self._event_hashes.pop(key))

    def _record(self, content: BlockContent, first: int) -> None:
        """Those that nobody holds yet, in runs of consecutive ones."""
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


def _num_equal(one: bytes, other: bytes) -> int:
    """Return how many bytes, of int32, both begin with."""
    num_tokens = min(len(one), len(other)) // 4
    differ = np.frombuffer(one, np.int32, num_tokens) != np.frombuffer(other, np.int32, num_tokens)
    return 4 * int(differ.argmax()) if differ.any() else 4 * num_tokens
