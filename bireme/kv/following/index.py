"""Which worker holds which KV blocks: an exact prefix match over all workers at once.

Blocks are known by their public 64-bit hash (hashing.py), which stands for the whole prefix; so a table from the hash
to the set of workers that hold the block is all there is, and no tree. A worker's depth is the number of blocks that
it holds, counted from the prompt's start without a hole.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bireme.errors import ConfigError, ResourceExhaustedError
from bireme.kv.kernels.arrays import Hashes
from bireme.kv.wire.event_reading import BlockChanges

MAX_PREDICTED = 1 << 20  # guesses, of one worker about one block
_MIN_CAPACITY = 1 << 10
_GROWTH = 2
_NUM_TIERS = 3  # device, host, disk
_SPARSE = 0.2  # a table with fewer entries gives memory back
_KEPT_OF_PREDICTED = 0.8
_TICKS_PER_S = 1000
_UINT64 = np.dtype(np.uint64)


class KvIndex:
    """Thread-compatible: its owner calls it from one thread at a time. Operations hold no GIL while they compute.

    Slots are small numbers for workers; that of a worker that left is given to a later one. Hashes are a 1D uint64
    array, or what numpy makes one of. Making the first index of a process takes about a second where numba is
    installed, or some more while its code is compiled for this machine; nothing later waits for a compiler.
    """

    def __init__(self, max_predicted: int = MAX_PREDICTED, clock: Callable[[], float] = time.monotonic) -> None:
        from bireme.kv.kernels import index_kernels, set_kernels, table_kernels

        self._kernels: Any = index_kernels
        self._set_kernels, self._rehash = set_kernels, table_kernels.rehash
        self._clock = clock
        self._max_predicted = max_predicted
        self._slots: dict[str, int] = {}
        self.num_slot_changes = 0
        self._free_slots: list[int] = []
        self._due: list[tuple[int, int, int, Hashes]] = []  # a heap of (deadline, order, slot, hashes)
        self._order = itertools.count()
        self._table = np.zeros((_MIN_CAPACITY, 2), np.uint64)
        self._guesses = np.zeros((_MIN_CAPACITY, 2), np.uint64)
        self._records = np.zeros((64, 4), np.uint64)
        self._interned = np.zeros((2 * 64, 2), np.uint64)
        self._pool = np.zeros(256, np.uint64)
        self._records[0] = secrets.randbits(64) | 1, secrets.randbits(64), 0, 0
        self._secret = self._records[0, 0]
        self._state = np.zeros(set_kernels.STATE_SIZE, np.int64)
        self._state[[set_kernels.NEXT_RECORD, set_kernels.WIDTH]] = 1, 1
        self._held = np.zeros(64, np.int64)  # memberships by slot
        self._scratch = np.zeros((7, 1), np.uint64)

    @property
    def slots(self) -> Mapping[str, int]:
        """The workers' slots by their names."""
        return self._slots

    @property
    def num_slots(self) -> int:
        """How long a row of `match` is: more than any slot."""
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        return int(self._state[self._set_kernels.NUM_BLOCKS])

    @property
    def num_memberships(self) -> int:
        """How many times a block is held: by worker and tier, with guesses."""
        return int(self._held.sum())

    @property
    def num_predicted(self) -> int:
        return int(self._state[self._set_kernels.NUM_GUESSES])

    @property
    def nbytes(self) -> int:
        arrays = (self._table, self._guesses, self._records, self._interned, self._pool, self._held, self._scratch)
        return sum(array.nbytes for array in arrays) + sum(hashes.nbytes for _, _, _, hashes in self._due)

    def add_worker(self, name: str) -> int:
        """Return the worker's slot. Raises ConfigError where the name is taken, or all slots are."""
        if name in self._slots:
            raise ConfigError(f"worker {name} is in the index already: two workers with one name can't be told apart")
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._slots)
        if slot >= self._kernels.MAX_SLOTS:
            heapq.heappush(self._free_slots, slot)
            raise ConfigError(f"{name}: the index has room for {self._kernels.MAX_SLOTS} workers")
        if slot >= len(self._held):
            self._widen(2 * len(self._held))
        self._slots[name] = slot
        self.num_slot_changes += 1
        return slot

    def remove_worker(self, slot: int) -> None:
        """Forget the worker and what it held. Raises KeyError for a slot that no worker has."""
        name = next((name for name, one in self._slots.items() if one == slot), None)
        if name is None:
            raise KeyError(slot)
        self.cleared(slot)
        del self._slots[name]
        self.num_slot_changes += 1
        heapq.heappush(self._free_slots, slot)

    def stored(self, slot: int, parent: int | None, hashes: Hashes | Iterable[int], tier: int = 0) -> bool:
        """The worker holds these blocks, of which each follows the one before it and the first follows `parent`.

        Returns whether it holds the parent too: if not, an event was missed.
        """
        self._expire()
        words = _words(hashes)
        self._write(self._kernels.store, words, slot, tier)
        if parent is None:
            return True
        first = np.array([parent], np.uint64)
        return bool(self._kernels.holds_first(self._table, self._records, self._pool, self._state, first, slot))

    def removed(self, slot: int, hashes: Hashes | Iterable[int], tier: int = 0) -> None:
        """The worker no longer holds these blocks in this tier. What follows them stays, but does not count."""
        self._write(self._kernels.remove, _words(hashes), slot, tier)
        self._shrink()

    def cleared(self, slot: int) -> None:
        """The worker holds nothing. Takes time by the size of the whole index, unless it held nothing anyway."""
        while self._kernels.clear(self._table, *self._sets, self._held, slot) < len(self._table):
            self._make_room()
        self._shrink()

    def apply(self, changes: BlockChanges) -> None:
        """Take in what workers tell of the blocks that they stored, removed or cleared; the changes are used up."""
        self._expire()
        at, end, kernel = changes.first, changes.end, self._kernels.apply
        while (at := kernel(self._table, *self._sets, self._held, changes.rows, at, end, changes.hashes)) < end:
            self._make_room()
        self._shrink()

    def predicted(self, slot: int, hashes: Hashes, ttl: float) -> None:
        """The worker will hold these blocks: believed for `ttl` seconds, or until an event tells.

        The array is kept: leave it as it is. At the limit of guesses the oldest go first, of a prompt its end.
        """
        self._expire()
        words = _words(hashes)
        deadline = int((self._clock() + ttl) * _TICKS_PER_S)
        at = 0
        while at < len(words):
            kernel, held = self._kernels.predict, self._held
            at = kernel(self._table, *self._sets, held, self._guesses, words, at, slot, deadline)
            if at < len(words):
                self._make_room()
        heapq.heappush(self._due, (deadline, next(self._order), slot, words))
        if self.num_predicted > self._max_predicted:
            self._prune()

    def match(self, hashes: Hashes | Iterable[int]) -> npt.NDArray[np.int32]:
        """Return depths, [3 tiers, num_slots]: how many blocks from the start each worker holds.

        Row 0 counts blocks on the device, row 1 those on device or host, row 2 those in any tier: each row is at
        least as deep as the one before it.
        """
        self._expire()
        depths = np.empty((_NUM_TIERS, self._held.shape[0]), np.int32)
        self._kernels.match(self._table, self._records, self._pool, self._scratch, _words(hashes), depths)
        return depths

    @property
    def _sets(self) -> tuple[npt.NDArray[Any], ...]:
        return self._interned, self._records, self._pool, self._state

    def _write(self, kernel: Callable[..., int], words: Hashes, slot: int, tier: int) -> None:
        at, end = 0, len(words)
        while (at := kernel(self._table, *self._sets, self._held, words, at, end, slot, tier)) < end:
            self._make_room()

    def _expire(self) -> None:
        """Take back the guesses whose time has come."""
        if not self._due:
            return
        now = int(self._clock() * _TICKS_PER_S)
        if self._due[0][0] > now:
            return
        while self._due and self._due[0][0] <= now:
            _, _, slot, words = heapq.heappop(self._due)
            self._take_guesses(words, slot, now)
        self._shrink()

    def _prune(self) -> None:
        while self._due and self.num_predicted > _KEPT_OF_PREDICTED * self._max_predicted:
            deadline, _, slot, words = heapq.heappop(self._due)
            excess = self.num_predicted - int(_KEPT_OF_PREDICTED * self._max_predicted)
            if excess < len(words):  # the deeper blocks go, the start stays
                heapq.heappush(self._due, (deadline, next(self._order), slot, words[:-excess]))
                words = words[-excess:]
            self._take_guesses(words, slot, deadline)
        self._shrink()

    def _take_guesses(self, words: Hashes, slot: int, now: int) -> None:
        kernel, at = self._kernels.expire, 0
        while at < len(words):
            at = kernel(self._table, *self._sets, self._held, self._guesses, words, at, slot, now)
            if at < len(words):
                self._make_room()

    def _make_room(self) -> None:
        """Grow whatever is too small for the next operation. Raises ResourceExhaustedError where numbers end."""
        kernels = self._set_kernels
        if self.num_blocks + 1 > 0.8 * len(self._table):
            if len(self._table) >= 1 << 31:
                raise ResourceExhaustedError(f"the index holds {self.num_blocks} blocks; it has no room for more")
            self._table = self._rehashed(self._table, int(_GROWTH * len(self._table)))
        if self.num_predicted + 1 > 0.8 * len(self._guesses):
            self._guesses = self._rehashed(self._guesses, int(_GROWTH * len(self._guesses)))
        if kernels.lacks_room(self._table, self._records, self._pool, self._state):
            self._rebuild_sets(int(self._state[kernels.WIDTH]))

    def _shrink(self) -> None:
        """Give memory back where little of it is used."""
        if len(self._table) > _MIN_CAPACITY and self.num_blocks < _SPARSE * len(self._table):
            self._table = self._rehashed(self._table, 2 * self.num_blocks)
        if len(self._guesses) > _MIN_CAPACITY and self.num_predicted < _SPARSE * len(self._guesses):
            self._guesses = self._rehashed(self._guesses, 2 * self.num_predicted)
        if len(self._records) > 64 and self._state[self._set_kernels.NUM_RECORDS] < _SPARSE * len(self._records):
            self._rebuild_sets(int(self._state[self._set_kernels.WIDTH]))

    def _rehashed(self, table: Hashes, capacity: int) -> Hashes:
        new = np.zeros((max(capacity, _MIN_CAPACITY), 2), np.uint64)
        self._rehash(table, new, self._secret)
        return new

    def _widen(self, num_slots: int) -> None:
        self._held = np.concatenate([self._held, np.zeros(num_slots - len(self._held), np.int64)])
        self._scratch = np.zeros((7, num_slots // 64), np.uint64)
        self._rebuild_sets(num_slots // 64)

    def _rebuild_sets(self, width: int) -> None:
        """Move the records to arrays half of which is free."""
        num_records = max(64, 2 * int(self._state[self._set_kernels.NUM_RECORDS]) + 8)
        records = np.zeros((num_records, 4), np.uint64)
        interned = np.zeros((2 * num_records, 2), np.uint64)
        kernels = self._set_kernels
        used = kernels.pool_words(self._interned, self._records, width)
        pool = np.zeros(2 * used + 64 * width, np.uint64)
        kernels.rebuild_sets(self._table, self._records, self._pool, self._state, interned, records, pool, width)
        self._records, self._interned, self._pool = records, interned, pool


def rank_name(worker: str, rank: int) -> str:
    """Return what the index calls a worker's rank."""
    return f"{worker}/{rank}" if rank else worker


def _words(hashes: Hashes | Iterable[int]) -> Hashes:
    """Return hashes as the compiled functions take them."""
    if not isinstance(hashes, np.ndarray):
        return np.array(list(hashes), np.uint64)
    flags = hashes.flags
    if hashes.dtype is _UINT64 and flags.c_contiguous and flags.writeable:
        return hashes
    return np.array(hashes, np.uint64)
