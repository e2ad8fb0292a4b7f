"""Tables from 64-bit keys to words in numpy arrays: compiled by numba where it is installed, else plain Python.

A table is uint64 [capacity, 2] of (key, word), open addressing with linear probing; a word of 0 is an empty place.
Erasing moves later entries back, so that churn leaves nothing behind. The home of a key depends on a secret odd number:
prompts cannot be chosen so that their blocks crowd together.
"""

from __future__ import annotations

import numpy as np

from bireme.kv.kernels.compiling import Scalar, Words, compiled

TABLE, WORDS, STATE = "uint64[:,::1]", "uint64[::1]", "int64[::1]"  # types of arguments, for `compiled`
MAX_LOAD = 0.8
FETCHED = 32  # a power of two

_ZERO = np.uint64(0)
_HALF = np.uint64(32)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


@compiled()
def home_of(key: Scalar, secret: Scalar, capacity: Scalar) -> Scalar:
    return np.int64((((key * secret) >> _HALF) * np.uint64(capacity)) >> _HALF)


@compiled()
def probe(table: Words, key: Scalar, secret: Scalar) -> Scalar:
    """Return the place of the key, or the empty one where it belongs."""
    capacity = table.shape[0]
    at = home_of(key, secret, capacity)
    while table[at, 1] != _ZERO and table[at, 0] != key:
        at += 1
        if at == capacity:
            at = 0
    return at


@compiled()
def fetch(table: Words, hashes: Words, first: Scalar, end: Scalar, secret: Scalar) -> Scalar:
    """Read the homes of the next blocks at once, so that what follows need not wait for memory at each of them.

    Returns how many are there: without a use of what is read, the compiler leaves the reading out.
    """
    found: Scalar = 0
    for number in range(first, min(first + FETCHED, end)):
        found += np.int64(table[home_of(hashes[number], secret, table.shape[0]), 0] == hashes[number])
    return found


@compiled()
def erase(table: Words, at: Scalar, secret: Scalar) -> None:
    capacity = table.shape[0]
    later = at
    while True:
        table[at, 1] = _ZERO
        while True:
            later += 1
            if later == capacity:
                later = 0
            if table[later, 1] == _ZERO:
                return
            home = home_of(table[later, 0], secret, capacity)
            if (later - home) % capacity >= (later - at) % capacity:
                break
        table[at, 0] = table[later, 0]
        table[at, 1] = table[later, 1]
        at = later


@compiled(f"void({TABLE}, {TABLE}, uint64)")
def rehash(old: Words, new: Words, secret: Scalar) -> None:
    """Move all entries to an empty table that has room for them."""
    for at in range(old.shape[0]):
        if old[at, 1] != _ZERO:
            place = probe(new, old[at, 0], secret)
            new[place, 0] = old[at, 0]
            new[place, 1] = old[at, 1]


@compiled()
def mixed(member: Scalar, secret: Scalar) -> Scalar:
    """Return a member's part of the hash of a set: splitmix64's last step."""
    mixed = member * np.uint64(0x9E3779B97F4A7C15) + secret
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MIX_2
    return mixed ^ (mixed >> _SHIFT_3)


@compiled()
def pair_key(key: Scalar, slot: Scalar, secret: Scalar) -> Scalar:
    return key ^ mixed(np.uint64(slot + 1), secret)
