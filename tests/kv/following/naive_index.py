"""The index as anybody would write it: a dict from block, worker and tier. Tests compare."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from bireme.kv.following.index import KvIndex
from bireme.kv.kernels.event_columns import CLEAR, REMOVE, STORE
from bireme.kv.wire.event_reading import BlockChanges

DEVICE, HOST, DISK = range(3)
NAMES = [f"decode_{number}" for number in range(130)]  # more than two words of bits


class NaiveIndex:
    def __init__(self) -> None:
        self.tiers: dict[tuple[int, int], set[int]] = {}  # by slot and hash
        self.deadlines: dict[tuple[int, int], float] = {}

    def stored(self, slot: int, hashes: Iterable[int], tier: int) -> None:
        for one in hashes:
            self.tiers.setdefault((slot, one), set()).add(tier)
            self.deadlines.pop((slot, one), None)

    def removed(self, slot: int, hashes: Iterable[int], tier: int) -> None:
        for one in hashes:
            self.tiers.get((slot, one), set()).discard(tier)
            if tier == DEVICE:
                self.deadlines.pop((slot, one), None)

    def cleared(self, slot: int) -> None:
        self.tiers = {key: held for key, held in self.tiers.items() if key[0] != slot}
        self.deadlines = {key: at for key, at in self.deadlines.items() if key[0] != slot}

    def predicted(self, slot: int, hashes: Iterable[int], deadline: float) -> None:
        for one in hashes:
            if DEVICE not in self.tiers.get((slot, one), set()):
                self.deadlines[slot, one] = deadline

    def memberships(self, now: float) -> set[tuple[int, int, int | str]]:
        told = {(*key, tier) for key, tiers in self.tiers.items() for tier in tiers}
        return told | {(*key, "guess") for key, deadline in self.deadlines.items() if deadline > now}

    def depths(self, slot: int, hashes: list[int], now: float) -> tuple[int, ...]:
        found = []
        depth = 0
        for worst in range(3):
            while depth < len(hashes):
                held = set(self.tiers.get((slot, hashes[depth]), ()))
                if self.deadlines.get((slot, hashes[depth]), 0) > now:
                    held.add(DEVICE)
                if not any(tier <= worst for tier in held):
                    break
                depth += 1
            found.append(depth)
        return tuple(found)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """An index and the naive one, given the same random operations on chains that share their beginnings."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.index, self.naive = KvIndex(clock=self.clock), NaiveIndex()
        self.names = NAMES[: self.random.choice([1, 3, 9, 130])]
        self.slots: dict[str, int] = {}
        trunk = [self.random.getrandbits(64) for _ in range(12)]
        tails = [[self.random.getrandbits(64) for _ in range(12)] for _ in range(8)]
        self.chains = [trunk[: self.random.randint(0, 12)] + tail for tail in tails]

    def step(self) -> None:
        choice, tier = self.random.random(), self.random.choice([DEVICE, DEVICE, DEVICE, HOST, DISK])
        name, chain = self.random.choice(self.names), self.random.choice(self.chains)
        slot = self.slots.get(name)
        first = self.random.choice([0, 0, self.random.randint(0, len(chain) - 1)])
        part = chain[first : self.random.randint(first + 1, len(chain))]
        if slot is None:
            self.slots[name] = self.index.add_worker(name)
        elif choice < 0.3:
            self.index.stored(slot, chain[first - 1] if first else None, part, tier)
            self.naive.stored(slot, part, tier)
        elif choice < 0.5:
            self._apply(slot)
        elif choice < 0.8:
            self.index.removed(slot, part, tier)
            self.naive.removed(slot, part, tier)
        elif choice < 0.95:
            self.index.predicted(slot, np.array(chain[:6], np.uint64), 2.0)
            self.naive.predicted(slot, chain[:6], self.clock.now + 2.0)
        elif choice < 0.97:
            self.clock.now += self.random.choice([0.5, 1.5])
        elif choice < 0.985:
            self.index.cleared(slot)
            self.naive.cleared(slot)
        else:
            self.index.remove_worker(slot)
            self.naive.cleared(slot)
            del self.slots[name]

    def _apply(self, slot: int) -> None:
        """A few changes at once, as a batch of events brings them."""
        rows: list[tuple[int, int, int, int, int]] = []
        hashes: list[int] = []
        for _ in range(self.random.randint(1, 5)):
            chain, tier = self.random.choice(self.chains), self.random.choice([DEVICE, HOST, DISK])
            part = chain[self.random.randint(0, len(chain) - 1) :]
            kind = self.random.choice([STORE] * 20 + [REMOVE] * 15 + [CLEAR])
            rows.append((kind, tier, len(hashes), len(hashes) + len(part), slot))
            hashes += part
            if kind == STORE:
                self.naive.stored(slot, part, tier)
            elif kind == REMOVE:
                self.naive.removed(slot, part, tier)
            else:
                self.naive.cleared(slot)
        self.index.apply(BlockChanges(np.array(rows, np.int64), np.array(hashes, np.uint64), 0, len(rows)))

    def check(self) -> None:
        for chain in self.chains:
            depths = self.index.match(chain)
            for slot in self.slots.values():
                assert tuple(depths[:, slot]) == self.naive.depths(slot, chain, self.clock.now)
            assert depths.sum() == depths[:, list(self.slots.values())].sum()
        memberships = self.naive.memberships(self.clock.now)
        assert self.index.num_memberships == len(memberships)
        assert self.index.num_blocks == len({one for _, one, _ in memberships})
        for slot in list(self.slots.values())[:3]:
            told = {(slot, one, tier) for one, tier in dump(self.index, slot)}
            assert told == {one for one in memberships if one[0] == slot and one[2] != "guess"}


def dump(index: KvIndex, slot: int) -> list[tuple[int, int]]:
    """Return the hash and tier of all blocks that the worker told of."""
    from bireme.kv.kernels.index_kernels import NUM_TIERS
    from bireme.kv.kernels.set_kernels import has_member

    sets = index._records, index._pool, index._state
    return [
        (int(key), tier)
        for key, word in index._table[index._table[:, 1] != 0]
        for tier in range(NUM_TIERS)
        if has_member(word, np.uint64((slot << 2 | tier) + 1), *sets)
    ]
