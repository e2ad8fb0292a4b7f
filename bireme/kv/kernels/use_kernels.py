"""How often blocks are in use, by who uses them: a table (table_kernels.py) from block and user to a count."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bireme.kv.kernels.compiling import Counts, Scalar, Words, compiled
from bireme.kv.kernels.table_kernels import STATE, TABLE, WORDS, erase, pair_key, probe

_ZERO, _ONE = np.uint64(0), np.uint64(1)


@compiled()
def _is_used(table: Words, block: Scalar, user: Scalar, secret: Scalar) -> Scalar:
    return table[probe(table, pair_key(block, user, secret), secret), 1] != _ZERO


@compiled(f"int64({TABLE}, {WORDS}, int64, uint64)")
def add(table: Words, blocks: Words, user: Scalar, secret: Scalar) -> Scalar:
    """Count one use more of each block, for which there must be room; return how many were not in use."""
    count: Scalar = 0
    for number in range(blocks.shape[0]):
        key = pair_key(blocks[number], user, secret)
        at = probe(table, key, secret)
        count += np.int64(table[at, 1] == _ZERO)
        table[at, 0] = key
        table[at, 1] += _ONE
    return count


@compiled(f"int64({TABLE}, {WORDS}, int64, uint64)")
def subtract(table: Words, blocks: Words, user: Scalar, secret: Scalar) -> Scalar:
    """Count one use less of each block; return how many are in use no more."""
    count: Scalar = 0
    for number in range(blocks.shape[0]):
        at = probe(table, pair_key(blocks[number], user, secret), secret)
        if table[at, 1] > _ONE:
            table[at, 1] -= _ONE
        elif table[at, 1] == _ONE:
            erase(table, at, secret)
            count += 1
    return count


@compiled(f"void({TABLE}, {WORDS}, {STATE}, uint64, float64[::1])")
def shared(table: Words, blocks: Words, users: Counts, secret: Scalar, found: npt.NDArray[np.float64]) -> None:
    """Write for each user how many of a prompt's blocks it uses already: prefixes are in use, if their ends are."""
    for number in range(users.shape[0]):
        found[number] = 0
        if blocks.shape[0] == 0 or not _is_used(table, blocks[0], users[number], secret):
            continue
        low, high = 1, blocks.shape[0]
        while low < high:
            middle = (low + high + 1) // 2
            if _is_used(table, blocks[middle - 1], users[number], secret):
                low = middle
            else:
                high = middle - 1
        found[number] = low


@compiled(f"void({TABLE}, {WORDS}, {STATE}, uint64, float64[::1])")
def last(table: Words, blocks: Words, users: Counts, secret: Scalar, found: npt.NDArray[np.float64]) -> None:
    """Write for each user how many of the last of its first found[...] blocks of a prompt it uses."""
    for number in range(users.shape[0]):
        held: Scalar = min(np.int64(found[number]), blocks.shape[0])
        found[number] = 0
        if held == 0 or not _is_used(table, blocks[held - 1], users[number], secret):
            continue
        low, high = 0, held - 1
        while low < high:
            middle = (low + high) // 2
            if _is_used(table, blocks[middle], users[number], secret):
                high = middle
            else:
                low = middle + 1
        found[number] = held - low
