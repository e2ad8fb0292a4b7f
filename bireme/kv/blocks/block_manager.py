"""Which KV blocks a request holds, in each group of layers that share an attention window.

A group with a window holds only the blocks that the next token can see: decode frees the others as it advances.

Blocks that a lower tier has are *missing* from a table until `onboard` has taken room for them, and belong to nobody
else until `onboarded`.

A *reservation* promises a request its worst case. In a group without a window a request keeps its blocks, so only what
is promised beyond them must be available, and a shared block counts once. In a group with a window a request frees a
shared block and needs another while the sharer keeps the first, so each request counts with all that it may hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bireme.kv.blocks import hashing
from bireme.kv.blocks.block_pool import DEFAULT_PRIORITY, NULL, BlockPool, Retention
from bireme.kv.blocks.block_tiers import BlockCopy, BlockTiers, CopyResult
from bireme.kv.blocks.events import DEVICE, EventBuffer, StoredBlock


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share a window."""

    window: int  # tokens visible, the token itself among them; 0: all
    num_blocks: int
    lower: tuple[int, ...] = ()  # blocks in host memory, and on disk


@dataclass(slots=True, eq=False)
class BlockTable:
    """One request's blocks: `blocks[group][i]` holds tokens [i * size, (i + 1) * size); NULL: not held."""

    blocks: list[list[int]]
    first: list[int]  # per group, index of the first block held
    reserved: list[int]  # per group, the most blocks that it may come to hold at once
    root: bytes
    seed: int
    lora_name: str
    cache_salt: str
    media: tuple[hashing.MediaSpan, ...] = ()  # pictures in the prompt; part of the blocks' hashes
    hashes: list[bytes] = field(default_factory=list)  # of full blocks
    event_hashes: list[int] = field(default_factory=list)
    num_committed: int = 0  # blocks offered for reuse
    missing: list[list[int]] = field(default_factory=list)  # per group, indices of blocks that lower tiers have
    matched: Counter[int] = field(default_factory=Counter)  # tier -> blocks of the widest window, by the last match
    retention: Callable[[int], Retention | None] | None = None  # by index; None: as it was

    def num_held(self, group: int) -> int:
        return len(self.blocks[group]) - self.first[group] - len(self.missing[group])

    def claim(self, group: int) -> int:
        return max(self.reserved[group], self.num_held(group))


class BlockManager:
    """The pools of all groups. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        tokens_per_block: int,
        model: str = "",
        enable_reuse: bool = True,
        events: EventBuffer | None = None,
        margin: int = 0,
        min_priority: int = DEFAULT_PRIORITY,
    ) -> None:
        """`margin`, `min_priority`: see BlockTiers."""
        self.groups = tuple(groups)
        self.tokens_per_block = tokens_per_block
        self.has_windows = any(spec.window for spec in groups)
        self.events = events
        # Blocks of narrower windows come and go while a prefix stays reusable: the widest speaks for all.
        self._event_group = min(
            range(len(groups)), key=lambda at: -groups[at].window if groups[at].window else -(1 << 62)
        )
        self.num_released = 0  # changes whenever room may have been made
        self._model = model
        self._enable_reuse = enable_reuse
        lower = [[spec.lower[tier] for spec in groups] for tier in range(len(groups[0].lower))]
        num_blocks = [[spec.num_blocks for spec in groups], *lower]
        self.tiers = BlockTiers(num_blocks, events, margin, min_priority)
        self.pools = self.tiers.pools[DEVICE]
        self._promised = [0] * len(self.groups)  # reserved and not held yet
        self._claimed = [0] * len(self.groups)  # reserved or held, whichever is more, shared blocks as often as held

    def rename(self, model: str) -> None:
        """Have blocks from now on named by another model, whose KV is not the one's before."""
        self._model = model

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_referenced(self) -> int:
        return sum(pool.num_referenced for pool in self.pools)

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached for pool in self.pools)

    def first_visible(self, group: int, position: int) -> int:
        """Return the first token that a token at `position` sees in this group."""
        window = self.groups[group].window
        return max(0, position - window + 1) if window else 0

    def worst_case(self, num_tokens: int, chunk: int) -> list[int]:
        """Return, per group, the most blocks that a request holds when it grows to `num_tokens` in steps <= `chunk`."""
        size = self.tokens_per_block
        whole = -(-num_tokens // size)
        return [
            min(whole, (spec.window + min(chunk, num_tokens) - 2) // size + 2) if spec.window else whole
            for spec in self.groups
        ]

    def can_ever_hold(self, need: Sequence[int]) -> bool:
        return all(count <= spec.num_blocks for count, spec in zip(need, self.groups, strict=True))

    def open(
        self,
        lora_name: str = "",
        cache_salt: str = "",
        media: tuple[hashing.MediaSpan, ...] = (),
        retention: Callable[[int], Retention | None] | None = None,
    ) -> BlockTable:
        """Return an empty table. Only requests of the same LoRA and salt share blocks."""
        count = len(self.groups)
        return BlockTable(
            blocks=[[] for _ in range(count)],
            first=[0] * count,
            reserved=[0] * count,
            root=hashing.reuse_root(self._model, lora_name, cache_salt),
            seed=hashing.event_seed(lora_name, cache_salt),
            lora_name=lora_name,
            cache_salt=cache_salt,
            media=media,
            missing=[[] for _ in range(count)],
            retention=retention,
        )

    def match(self, table: BlockTable, tokens: Sequence[int], limit: int) -> int:
        """Take the cached blocks of the longest known prefix of at most `limit` tokens; return its tokens.

        The table must be empty. Groups with a window get only the blocks that the next token sees. Those that a lower
        tier has are missing.
        """
        table.matched.clear()
        if not self._enable_reuse:
            return 0
        size = self.tokens_per_block
        self._hash(table, tokens, limit // size)
        count = self._longest(table.hashes[: limit // size])
        for group, pool in enumerate(self.pools):
            first = self.first_visible(group, count * size) // size
            held = [pool.lookup(digest) or NULL for digest in table.hashes[first:count]]
            for block in held:
                if block != NULL:
                    pool.share(block)
            with self._counted(table, group):
                table.blocks[group] = [NULL] * first + held
                table.first[group] = first
                table.missing[group] = [at for at, block in enumerate(held, first) if block == NULL]
            self._retain(table, group, range(first, count))
        table.num_committed = count
        table.matched = self._tiers_of(table, count)
        return count * size

    def reserve(self, table: BlockTable, need: Sequence[int]) -> bool:
        """Promise `need` blocks per group (held ones included), in place of what was. False: no room, no change."""
        for group, count in enumerate(need):
            if max(count, table.num_held(group)) - table.claim(group) > self._room(group):
                return False
        for group, count in enumerate(need):
            with self._counted(table, group):
                self.num_released += count < table.reserved[group]
                table.reserved[group] = count
        return True

    def is_coming(self, table: BlockTable) -> bool:
        """Whether copies for another request bring a block that is missing here."""
        return any(
            self.tiers.is_coming(group, table.hashes[index])
            for group, missing in enumerate(table.missing)
            for index in missing
        )

    def onboard(self, table: BlockTable) -> list[BlockCopy]:
        """Take room on the device for the missing blocks, which must be reserved; `onboarded` must follow."""
        copies: list[BlockCopy] = []
        for group, missing in enumerate(table.missing):
            with self._counted(table, group):
                for index in missing:
                    copy = self.tiers.onboard(group, table.hashes[index])
                    table.blocks[group][index] = copy.target
                    copies.append(copy)
                missing.clear()
        return copies

    def onboarded(self, table: BlockTable, copies: Sequence[BlockCopy], results: Sequence[CopyResult]) -> None:
        """Let others find what has arrived; what has not is the table's alone, and void."""
        for copy, result in zip(copies, results, strict=True):
            self.tiers.onboarded(copy, result)
        for group, blocks in enumerate(table.blocks):
            self._retain(table, group, range(len(blocks)))

    def can_grow(self, table: BlockTable, num_tokens: int, position: int) -> bool:
        """Say whether `grow` would succeed without touching what others were promised."""
        return all(
            max(table.claim(group), table.num_held(group) + self._missing(table, group, num_tokens, position))
            - table.claim(group)
            <= self._room(group)
            for group in range(len(self.pools))
        )

    def grow(self, table: BlockTable, num_tokens: int, position: int) -> None:
        """Hold blocks for tokens up to `num_tokens`, from the first that `position` sees. There must be room."""
        last = -(-num_tokens // self.tokens_per_block)
        for group, pool in enumerate(self.pools):
            blocks = table.blocks[group]
            if len(blocks) >= last:
                continue
            with self._counted(table, group):
                hidden = self.first_visible(group, position) // self.tokens_per_block
                if len(blocks) < hidden:
                    assert table.first[group] == len(blocks), "slide before growing"
                    table.first[group] = hidden
                    blocks.extend([NULL] * (hidden - len(blocks)))
                blocks.extend([pool.allocate() for _ in range(last - len(blocks))])

    def commit(
        self, table: BlockTable, tokens: Sequence[int], num_computed: int, valid_from: Sequence[int] | None = None
    ) -> None:
        """Offer the blocks that are full with computed tokens for reuse.

        `valid_from`: per group, the first token whose row was written. An import leaves out hidden rows, which may be
        the first of a block: such a block is not offered.
        """
        full = num_computed // self.tokens_per_block
        if full <= table.num_committed or not self._enable_reuse:
            return
        self._hash(table, tokens, full)
        for group, pool in enumerate(self.pools):
            begin = -(-valid_from[group] // self.tokens_per_block) if valid_from is not None else 0
            self._commit_group(table, tokens, group, pool, max(begin, table.num_committed), full)
            self._retain(table, group, range(table.num_committed, full))
        table.num_committed = full

    def slide(self, table: BlockTable, position: int) -> None:
        """Free the blocks that a token at `position` (and all after it) can't see any more."""
        for group, spec in enumerate(self.groups):
            if not spec.window:
                continue
            first, end = table.first[group], len(table.blocks[group])
            hidden = min(self.first_visible(group, position) // self.tokens_per_block, end)
            if hidden > first:
                with self._counted(table, group):
                    # Shallowest first: a later hit needs the last of the hidden blocks longest.
                    self._free(table, group, range(first, hidden))
                    table.first[group] = hidden
                    table.missing[group] = [index for index in table.missing[group] if index >= hidden]

    def release(self, table: BlockTable) -> None:
        """Free everything and drop the reservation; the empty table may be used again."""
        for group in range(len(self.pools)):
            with self._counted(table, group):
                # Deepest first: the leaves of a cached chain are evicted before their parents.
                self._free(table, group, range(len(table.blocks[group]) - 1, table.first[group] - 1, -1))
                table.blocks[group], table.first[group], table.reserved[group] = [], 0, 0
                table.missing[group] = []
        table.num_committed = 0
        self.num_released += 1

    def settle(self, table: BlockTable) -> None:
        """Drop the reservation and keep the blocks: the request won't grow any more."""
        for group in range(len(self.pools)):
            with self._counted(table, group):
                table.reserved[group] = 0
        self.num_released += 1

    def _room(self, group: int) -> int:
        """Return how many blocks can still be promised or taken; negative between `match` and `reserve`."""
        pool = self.pools[group]
        if self.groups[group].window:
            return pool.num_blocks - self._claimed[group]
        return pool.num_available - self._promised[group]

    @contextmanager
    def _counted(self, table: BlockTable, group: int) -> Iterator[None]:
        self._promised[group] -= table.claim(group) - table.num_held(group)
        self._claimed[group] -= table.claim(group)
        yield
        self._promised[group] += table.claim(group) - table.num_held(group)
        self._claimed[group] += table.claim(group)

    def _missing(self, table: BlockTable, group: int, num_tokens: int, position: int) -> int:
        size = self.tokens_per_block
        begin = max(len(table.blocks[group]), self.first_visible(group, position) // size)
        return max(0, -(-num_tokens // size) - begin)

    def _free(self, table: BlockTable, group: int, indices: Iterable[int]) -> None:
        blocks = table.blocks[group]
        for index in indices:
            if blocks[index] != NULL:  # else missing
                self.pools[group].free(blocks[index])
                blocks[index] = NULL
            self.num_released += 1

    def _hash(self, table: BlockTable, tokens: Sequence[int], count: int) -> None:
        size = self.tokens_per_block
        for index in range(len(table.hashes), count):
            raw = hashing.token_bytes(tokens[index * size : (index + 1) * size])
            spans = hashing.media_in(table.media, index * size, (index + 1) * size) if table.media else []
            media = hashing.media_bytes(spans, index * size)
            table.hashes.append(hashing.reuse_hash(table.hashes[-1] if table.hashes else table.root, raw, media))
            if self.events is not None:
                parent = table.event_hashes[-1] if table.event_hashes else None
                local = hashing.local_hash(raw, table.seed, [span.event_hash for span in spans])
                table.event_hashes.append(hashing.sequence_hash(parent, local))

    def _longest(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks from the start every group can serve."""
        best = len(hashes)
        usable = [True] * (best + 1)
        for group in range(len(self.pools)):
            run = 0  # consecutive blocks held, up to here
            for count, digest in enumerate(hashes, 1):
                run = run + 1 if self.tiers.find(group, digest) is not None else 0
                hidden = self.first_visible(group, count * self.tokens_per_block) // self.tokens_per_block
                usable[count] = usable[count] and run >= count - hidden
        return next(count for count in range(best, -1, -1) if usable[count])

    def _retain(self, table: BlockTable, group: int, indices: Iterable[int]) -> None:
        """The last request that says how its blocks are kept is heard."""
        if table.retention is not None:
            for index in indices:
                block, retention = table.blocks[group][index], table.retention(index)
                if block != NULL and retention is not None:
                    self.pools[group].retain(block, retention)

    def _tiers_of(self, table: BlockTable, count: int) -> Counter[int]:
        """Return in which tiers the first blocks lie, of the widest window; those that it does not show need none."""
        group = self._event_group
        found: Counter[int] = Counter()
        for index in table.missing[group]:
            found[self.tiers.find(group, table.hashes[index]) or DEVICE] += 1
        found[DEVICE] += count - len(table.missing[group])
        return found

    def _commit_group(
        self, table: BlockTable, tokens: Sequence[int], group: int, pool: BlockPool, begin: int, full: int
    ) -> None:
        has_events = self.events is not None and group == self._event_group
        begin_new = begin  # of those that are new, without an event yet
        for index in range(begin, full):
            block, digest = table.blocks[group][index], table.hashes[index]
            event_hash = table.event_hashes[index] if has_events else None
            has_copy = self.tiers.find(group, digest) is not None
            is_new = block != NULL and pool.commit(block, digest, event_hash)
            if is_new and has_copy:
                self.tiers.moved(event_hash, DEVICE)
            if has_copy or not is_new:
                self._record(table, tokens, group, range(begin_new, index))
                begin_new = index + 1
        self._record(table, tokens, group, range(begin_new, full))

    def _record(self, table: BlockTable, tokens: Sequence[int], group: int, new: range) -> None:
        """Record the event of new blocks that follow each other."""
        if self.events is None or group != self._event_group or not new:
            return
        size = self.tokens_per_block
        blocks = [
            StoredBlock(
                table.event_hashes[index],
                tuple(tokens[index * size : (index + 1) * size]),
                tuple(span.event_hash for span in hashing.media_in(table.media, index * size, (index + 1) * size)),
            )
            for index in new
        ]
        parent = table.event_hashes[new.start - 1] if new.start else None
        self.events.stored(parent, tuple(blocks), table.lora_name, table.cache_salt)
