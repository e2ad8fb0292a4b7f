"""Where KV blocks lie: on the device, in host memory, on disk. It says what is to be copied, and copies nothing.

A block with a hash never changes, so it can be copied while it is used. Those that are next to be evicted are copied to
the tier below ahead of time: an eviction waits for nothing. A copy whose source has been given up meanwhile is thrown
away, and a block whose copy comes too late is lost. Copies that come back are a request's own until they have arrived.

Readers of events are told of a block in the highest tier that has it.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from bireme.kv.blocks.block_pool import DEFAULT_PRIORITY, BlockPool
from bireme.kv.blocks.events import DEVICE, EventBuffer

_PAUSE_S = 10.0  # nothing is copied into a tier that could not be written, for so long


class CopyResult(enum.Enum):
    DONE = enum.auto()
    FAILED = enum.auto()  # what was read is not what was written, or it could not be written
    CANCELLED = enum.auto()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    group: int
    digest: bytes
    source_tier: int
    source: int
    version: int  # of the source
    target_tier: int
    target: int
    is_seen: bool = False  # the source, when the copy was planned


@dataclass(slots=True)
class TierCounts:
    """Blocks by (tier, group). Of a tier: copied into it, copied from it to the device, lost to it, failed there."""

    offloaded: Counter[tuple[int, int]] = field(default_factory=Counter)
    onboarded: Counter[tuple[int, int]] = field(default_factory=Counter)
    missed: Counter[tuple[int, int]] = field(default_factory=Counter)  # evicted above before they were copied
    failed: Counter[tuple[int, int]] = field(default_factory=Counter)


class BlockTiers:
    """Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        num_blocks: Sequence[Sequence[int]],
        events: EventBuffer | None = None,
        margin: int = 0,
        min_priority: int = DEFAULT_PRIORITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_blocks`: by tier and group, the device's first. `margin`: blocks that the next steps may take, of a
        group; so many are free or have a copy below. Blocks of a retention priority below `min_priority` are not
        copied.
        """
        self.pools = tuple(
            tuple(BlockPool(count, partial(self._evicted, tier, group), clock) for group, count in enumerate(counts))
            for tier, counts in enumerate(num_blocks)
        )
        self.counts = TierCounts()
        self._events = events
        self._margin = margin
        self._min_priority = min_priority
        self._clock = clock
        self._moving: list[list[set[bytes]]] = [[set() for _ in pools] for pools in self.pools]  # out of each pool
        self._planned: dict[tuple[int, int], tuple[int, ...]] = {}  # what each pool was like when it was looked at
        self._paused_until = [0.0] * len(self.pools)
        self._coming: set[tuple[int, bytes]] = set()

    def find(self, group: int, digest: bytes) -> int | None:
        """Return the highest tier that has this block."""
        for tier, pools in enumerate(self.pools):
            if pools[group].lookup(digest) is not None:
                return tier
        return None

    def is_coming(self, group: int, digest: bytes) -> bool:
        """Whether a copy to the device is under way."""
        return (group, digest) in self._coming

    def offload(self) -> list[BlockCopy]:
        """Return the copies into lower tiers that are to be made now; `offloaded` must follow."""
        found: list[BlockCopy] = []
        for tier in range(len(self.pools) - 1):
            if self._paused_until[tier + 1] <= self._clock():
                for group in range(len(self.pools[tier])):
                    found += self._offload(tier, group)
        return found

    def offloaded(self, copies: Sequence[BlockCopy], results: Sequence[CopyResult]) -> None:
        for copy, result in zip(copies, results, strict=True):
            upper, lower = self.pools[copy.source_tier][copy.group], self.pools[copy.target_tier][copy.group]
            self._moving[copy.source_tier][copy.group].discard(copy.digest)
            self._planned.pop((copy.source_tier, copy.group), None)
            is_whole = result is CopyResult.DONE and upper.version(copy.source) == copy.version
            if is_whole and lower.commit(copy.target, copy.digest, upper.event_hash(copy.source)):
                lower.retain(copy.target, upper.retention(copy.source))
                lower.set_seen(copy.target, copy.is_seen and upper.is_seen(copy.source))
                self.counts.offloaded[copy.target_tier, copy.group] += 1
            elif result is CopyResult.FAILED:
                self._paused_until[copy.target_tier] = self._clock() + _PAUSE_S
                self.counts.failed[copy.target_tier, copy.group] += 1
            lower.free(copy.target)

    def onboard(self, group: int, digest: bytes) -> BlockCopy:
        """Take a block of the device for a copy from a lower tier, which has it; `onboarded` must follow.

        The block on the device is the caller's, without a hash.
        """
        tier = self.find(group, digest)
        assert tier, "a block of a lower tier"
        pool = self.pools[tier][group]
        source = pool.lookup(digest)
        assert source is not None
        pool.share(source)
        self._coming.add((group, digest))
        target = self.pools[DEVICE][group].allocate()
        return BlockCopy(group, digest, tier, source, pool.version(source), DEVICE, target, pool.is_seen(source))

    def onboarded(self, copy: BlockCopy, result: CopyResult) -> None:
        """What has arrived is found from now on. What could not be read is given up."""
        pool = self.pools[copy.source_tier][copy.group]
        self._coming.discard((copy.group, copy.digest))
        event_hash = pool.event_hash(copy.source)
        pool.free(copy.source)
        if result is CopyResult.FAILED:
            pool.forget(copy.source)
            self.counts.failed[copy.source_tier, copy.group] += 1
        elif result is CopyResult.DONE:
            self.counts.onboarded[copy.source_tier, copy.group] += 1
            self.pools[DEVICE][copy.group].set_seen(copy.target, copy.is_seen)
            if self.pools[DEVICE][copy.group].commit(copy.target, copy.digest, event_hash):
                self.pools[DEVICE][copy.group].retain(copy.target, pool.retention(copy.source))
                self.moved(event_hash, DEVICE)

    def moved(self, event_hash: int | None, tier: int) -> None:
        """Record that this is now the highest tier that has the block."""
        if self._events is not None and event_hash is not None:
            self._events.moved(event_hash, tier)

    def _offload(self, tier: int, group: int) -> list[BlockCopy]:
        pool, lower, moving = self.pools[tier][group], self.pools[tier + 1][group], self._moving[tier][group]
        state = (pool.num_changes, pool.num_free, lower.num_changes)
        if self._planned.get((tier, group)) == state:
            return []
        # Of a small tier half is left to blocks that are nowhere else: what is next to go here must not fill it.
        margin = min(self._margin, max(1, lower.num_blocks // 2))
        copies: list[BlockCopy] = []
        for block in islice(pool.eviction_order(), max(0, margin - pool.num_free)):
            if len(moving) >= margin or not lower.num_available:
                break
            digest = pool.digest(block)
            is_wanted = pool.retention(block).priority >= self._min_priority
            if is_wanted and digest not in moving and lower.lookup(digest) is None:
                moving.add(digest)
                target = lower.allocate()
                version, is_seen = pool.version(block), pool.is_seen(block)
                copies.append(BlockCopy(group, digest, tier, block, version, tier + 1, target, is_seen))
        self._planned[tier, group] = (pool.num_changes, pool.num_free, lower.num_changes)
        return copies

    def _evicted(self, tier: int, group: int, block: int, digest: bytes, event_hash: int | None) -> None:
        if any(pools[group].lookup(digest) is not None for pools in self.pools[:tier]):
            return
        for below in range(tier + 1, len(self.pools)):
            if (copy := self.pools[below][group].lookup(digest)) is not None:
                self.pools[below][group].touch(copy)
                self.moved(event_hash, below)
                return
        if tier + 1 < len(self.pools) and self.pools[tier][group].retention(block).priority >= self._min_priority:
            self.counts.missed[tier + 1, group] += 1
        if self._events is not None and event_hash is not None:
            self._events.removed(event_hash)
