"""What one rank of an engine holds, as its publisher tells it: engine events in, wire events and snapshots out.

Salted blocks go out under a keyed hash, without tokens: only who has the deployment's key can tell what they are
(hashing.py). A block of several copies is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from bireme.kv.blocks import hashing
from bireme.kv.blocks.events import (
    DEVICE,
    BlocksCleared,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    StoredBlock,
)
from bireme.kv.wire.event_wire import MEDIA_OF_TIERS, AllBlocksCleared, BlockRemoved, BlockStored, WireEvent

_MAX_TOKENS = 16_384  # of one wire event, and as many hashes


@dataclass(slots=True)
class HeldBlock:
    wire_hash: int
    parent: int | None  # engine's hash
    tokens: bytes  # u32 little endian; empty: salted
    media: tuple[int, ...]
    lora_name: str
    is_salted: bool
    tier: int = DEVICE
    copies: int = 1  # content that the reuse hash tells apart and the public one does not


class HeldBlocks:
    """Used from the publisher's thread alone."""

    def __init__(self, tokens_per_block: int, salt_key: bytes) -> None:
        self._size = tokens_per_block
        self._salt_key = salt_key
        self._held: dict[int, HeldBlock] = {}  # by the engine's hash

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, events: Iterable[KvEvent]) -> list[WireEvent]:
        """Return what readers are to be told, often less."""
        found: list[WireEvent] = []
        moved: list[int] = []  # engines tell of them one by one
        tier = DEVICE
        for event in events:
            if moved and not (isinstance(event, BlocksMoved) and event.tier == tier):
                found += self._move(moved, tier)
                moved = []
            if isinstance(event, BlocksStored):
                found += self._store(event)
            elif isinstance(event, BlocksRemoved):
                found += self._remove(event)
            elif isinstance(event, BlocksMoved):
                moved += event.block_hashes
                tier = event.tier
            elif isinstance(event, BlocksCleared):
                found += self.clear()
        if moved:
            found += self._move(moved, tier)
        return _merge_removals(found)

    def snapshot(self) -> Iterator[WireEvent]:
        """Yield what is held now, parents first; the blocks may change while it is read."""
        held = {key: (block, block.tier) for key, block in self._held.items()}
        return _describe(held, self._size, self._wire_hash)

    def clear(self) -> list[WireEvent]:
        self._held.clear()
        return [AllBlocksCleared()]

    def _store(self, event: BlocksStored) -> list[WireEvent]:
        new: dict[int, tuple[HeldBlock, int]] = {}
        parent = event.parent_hash
        for block in event.blocks:
            if (known := self._held.get(block.block_hash)) is not None:
                known.copies += 1
            else:
                held = self._held[block.block_hash] = self._make(block, parent, event)
                new[block.block_hash] = (held, DEVICE)
            parent = block.block_hash
        return list(_describe(new, self._size, self._wire_hash))

    def _make(self, block: StoredBlock, parent: int | None, event: BlocksStored) -> HeldBlock:
        is_salted = bool(event.cache_salt)
        return HeldBlock(
            self._wire_hash(block.block_hash, is_salted),
            parent,
            b"" if is_salted else hashing.token_bytes(block.tokens),
            () if is_salted else block.media,
            "" if is_salted else event.lora_name,
            is_salted,
        )

    def _remove(self, event: BlocksRemoved) -> list[WireEvent]:
        found: list[WireEvent] = []
        for block_hash in event.block_hashes:
            if (block := self._held.get(block_hash)) is None:
                continue
            block.copies -= 1
            if not block.copies:
                del self._held[block_hash]
                found.append(BlockRemoved([block.wire_hash], MEDIA_OF_TIERS[block.tier]))
        return found

    def _move(self, block_hashes: Iterable[int], tier: int) -> list[WireEvent]:
        moved: dict[int, tuple[HeldBlock, int]] = {}
        left: list[WireEvent] = []
        for block_hash in block_hashes:
            block = self._held.get(block_hash)
            if block is None or block.tier == tier or tier not in MEDIA_OF_TIERS:
                continue
            left.append(BlockRemoved([block.wire_hash], MEDIA_OF_TIERS[block.tier]))
            block.tier = tier
            moved[block_hash] = (block, tier)
        return [*_describe(moved, self._size, self._wire_hash), *left]

    def _wire_hash(self, block_hash: int, is_salted: bool) -> int:
        return hashing.salted_hash(block_hash, self._salt_key) if is_salted else block_hash


def _describe(
    held: dict[int, tuple[HeldBlock, int]], size: int, wire_hash: Callable[[int, bool], int]
) -> Iterator[WireEvent]:
    """Yield events that store these blocks (hash -> block and tier), parents first, consecutive ones together."""
    run: list[HeldBlock] = []
    run_tier, last = DEVICE, None
    for block_hash in _parents_first(held):
        block, tier = held[block_hash]
        goes_on = run and block.parent == last and _kind(block, tier) == _kind(run[0], run_tier)
        if run and (not goes_on or len(run) * size >= _MAX_TOKENS):
            yield _stored(run, run_tier, size, wire_hash)
            run = []
        run_tier = tier
        run.append(block)
        last = block_hash
    if run:
        yield _stored(run, run_tier, size, wire_hash)


def _kind(block: HeldBlock, tier: int) -> tuple[int, bool, str]:
    return tier, block.is_salted, block.lora_name


def _parents_first(held: dict[int, tuple[HeldBlock, int]]) -> Iterator[int]:
    """A block that was evicted and stored again comes after its children in the order of insertion."""
    done: set[int] = set()
    for block_hash in held:
        chain: list[int] = []
        at: int | None = block_hash
        while at is not None and at not in done and at in held:
            done.add(at)
            chain.append(at)
            at = held[at][0].parent
        yield from reversed(chain)


def _stored(run: list[HeldBlock], tier: int, size: int, wire_hash: Callable[[int, bool], int]) -> BlockStored:
    first = run[0]
    parent = wire_hash(first.parent, first.is_salted) if first.parent is not None else None
    media = [[f"{value:016x}{0:048x}" for value in block.media] or None for block in run]
    return BlockStored(
        [block.wire_hash for block in run],
        parent,
        hashing.tokens_of(b"".join(block.tokens for block in run)),
        0 if first.is_salted else size,
        medium=MEDIA_OF_TIERS[tier],
        lora_name=first.lora_name or None,
        extra_keys=media if any(media) else None,
    )


def _merge_removals(events: list[WireEvent]) -> list[WireEvent]:
    """Engines tell of evictions one by one."""
    found: list[WireEvent] = []
    last: BlockRemoved | None = None  # if it is the event before
    for event in events:
        if not isinstance(event, BlockRemoved):
            last = None
            found.append(event)
        elif last and last.medium == event.medium and len(last.block_hashes) < _MAX_TOKENS:
            last.block_hashes.extend(event.block_hashes)
        else:
            found.append(event)
            last = event
    return found
