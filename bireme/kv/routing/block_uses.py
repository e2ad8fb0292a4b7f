"""Which blocks each of many users has in use, and how often: in one table, asked about all users at once."""

from __future__ import annotations

import itertools
import secrets

import numpy as np
import numpy.typing as npt

from bireme.kv.kernels.arrays import Floats, Hashes

_MIN_CAPACITY = 1 << 10
_MAX_LOAD, _SPARSE = 0.8, 0.2


class BlockUses:
    """Used on one loop. Making the first loads, or compiles, the code: see KvIndex."""

    def __init__(self) -> None:
        from bireme.kv.kernels import table_kernels, use_kernels

        self.num_entries = 0  # of a block and a user
        self._rehash, self._kernels = table_kernels.rehash, use_kernels
        self._table = np.zeros((_MIN_CAPACITY, 2), np.uint64)
        self._secret = np.uint64(secrets.randbits(64) | 1)
        self._users = itertools.count()

    def new_user(self) -> int:
        """Return a number that nobody has had."""
        return next(self._users)

    def add(self, user: int, blocks: Hashes) -> int:
        """Return how many of the blocks the user did not use before."""
        self._resize(self.num_entries + len(blocks))
        added: int = self._kernels.add(self._table, blocks, user, self._secret)
        self.num_entries += added
        return added

    def subtract(self, user: int, blocks: Hashes) -> int:
        """Return how many of the blocks the user uses no more."""
        gone: int = self._kernels.subtract(self._table, blocks, user, self._secret)
        self.num_entries -= gone
        self._resize(self.num_entries)
        return gone

    def shared(self, users: npt.NDArray[np.int64], blocks: Hashes) -> Floats:
        """Return how many of a prompt's first blocks each user has in use: prefixes are, if their ends are."""
        found = np.zeros(len(users))
        self._kernels.shared(self._table, blocks, users, self._secret, found)
        return found

    def last(self, users: npt.NDArray[np.int64], blocks: Hashes, num_held: Floats) -> Floats:
        """Return how many of the last of its first `num_held` blocks of a prompt each user has in use."""
        found: Floats = np.floor(num_held)
        self._kernels.last(self._table, blocks, users, self._secret, found)
        return found

    def _resize(self, num_entries: int) -> None:
        capacity = len(self._table)
        if num_entries <= _MAX_LOAD * capacity and (num_entries >= _SPARSE * capacity or capacity <= _MIN_CAPACITY):
            return
        table = np.zeros((max(2 * num_entries, _MIN_CAPACITY), 2), np.uint64)
        self._rehash(self._table, table, self._secret)
        self._table = table
