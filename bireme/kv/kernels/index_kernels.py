"""What the prefix index does with its arrays: compiled by numba where it is installed, else plain Python.

The index is a table (table_kernels.py) from the block to the set of memberships (set_kernels.py) of who holds it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bireme.kv.kernels.compiling import Counts, Scalar, Words, compiled
from bireme.kv.kernels.event_columns import END, FIRST, KIND, REMOVE, SLOT, STORE, TIER
from bireme.kv.kernels.set_kernels import (
    FULL,
    IS_RECORD,
    NUM_BLOCKS,
    NUM_GUESSES,
    SETS,
    add,
    discard,
    has_member,
    has_slot,
    is_in,
    lacks_room,
    load_planes,
    minus,
    plus,
)
from bireme.kv.kernels.table_kernels import (
    FETCHED,
    MAX_LOAD,
    STATE,
    TABLE,
    WORDS,
    erase,
    fetch,
    home_of,
    pair_key,
    probe,
)

DEVICE, HOST, DISK, PREDICTED = range(4)
NUM_TIERS = 3  # told by events; PREDICTED is a guess about DEVICE
MAX_SLOTS = (1 << 13) - 1

_ZERO, _ONE = np.uint64(0), np.uint64(1)
_ALL = np.uint64((1 << 64) - 1)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)  # each of its runs of six bits is another number
_PLACES = np.array(
    [place for _, place in sorted((0x03F79D71B4CB0A89 << place & (1 << 64) - 1, place) for place in range(64))]
)


@compiled()
def _put(
    table: Words,
    interned: Words,
    records: Words,
    pool: Words,
    state: Counts,
    held: Counts,
    key: Scalar,
    slot: Scalar,
    tier: Scalar,
) -> None:
    """Add one membership; what an event tells takes the place of a guess."""
    at = probe(table, key, records[0, 0])
    word, member = table[at, 1], np.uint64((slot << 2 | tier) + 1)
    if word == _ZERO:
        table[at, 0] = key
        table[at, 1] = member
        state[NUM_BLOCKS] += 1
        held[slot] += 1
        return
    new = add(word, member, interned, records, pool, state)
    held[slot] += np.int64(new != word)
    guess = np.uint64((slot << 2 | PREDICTED) + 1)
    if tier != PREDICTED and has_member(new, guess, records, pool, state):
        new = discard(new, guess, interned, records, pool, state)
        held[slot] -= 1
    table[at, 1] = new


@compiled()
def _take(
    table: Words,
    interned: Words,
    records: Words,
    pool: Words,
    state: Counts,
    held: Counts,
    key: Scalar,
    slot: Scalar,
    tier: Scalar,
) -> None:
    """Take back one membership, if it is there; with one on the device also the guess about it."""
    at = probe(table, key, records[0, 0])
    word = table[at, 1]
    if word == _ZERO:
        return
    new = discard(word, np.uint64((slot << 2 | tier) + 1), interned, records, pool, state)
    held[slot] -= np.int64(new != word)
    guess = np.uint64((slot << 2 | PREDICTED) + 1)
    if tier == DEVICE and has_member(new, guess, records, pool, state):
        new = discard(new, guess, interned, records, pool, state)
        held[slot] -= 1
    if new == _ZERO:
        erase(table, at, records[0, 0])
        state[NUM_BLOCKS] -= 1
    else:
        table[at, 1] = new


@compiled(f"int64({TABLE}, {SETS}, {STATE}, {WORDS}, int64, int64, int64, int64)")
def store(
    table: Words,
    interned: Words,
    records: Words,
    pool: Words,
    state: Counts,
    held: Counts,
    hashes: Words,
    start: Scalar,
    end: Scalar,
    slot: Scalar,
    tier: Scalar,
) -> Scalar:
    """Add a membership of hashes[start:end]; return how far it came: less than all where `lacks_room`.

    What takes no record is done in this one function, without a call that gets arrays: those count references, which
    takes longer.
    """
    secret, capacity = records[0, 0], table.shape[0]
    limit = np.int64(MAX_LOAD * capacity)
    member, guess = np.uint64((slot << 2 | tier) + 1), np.uint64((slot << 2 | PREDICTED) + 1)
    for number in range(start, end):
        if (number - start) & (FETCHED - 1) == 0 and fetch(table, hashes, number, end, secret) < 0:
            return number
        key = hashes[number]
        at = home_of(key, secret, capacity)
        while table[at, 1] != _ZERO and table[at, 0] != key:
            at += 1
            if at == capacity:
                at = 0
        word = table[at, 1]
        if word == _ZERO:
            if state[NUM_BLOCKS] >= limit:
                return number
            table[at, 0] = key
            table[at, 1] = member
            state[NUM_BLOCKS] += 1
            held[slot] += 1
        elif word < FULL or (word < IS_RECORD and is_in(word, member)):
            if not is_in(word, member):
                word = plus(word, member)
                held[slot] += 1
            if is_in(word, guess):
                word = minus(word, guess)
                held[slot] -= 1
            table[at, 1] = word
        else:
            if lacks_room(table, records, pool, state):
                return number
            _put(table, interned, records, pool, state, held, key, slot, tier)
    return end


@compiled(f"int64({TABLE}, {SETS}, {STATE}, {WORDS}, int64, int64, int64, int64)")
def remove(
    table: Words,
    interned: Words,
    records: Words,
    pool: Words,
    state: Counts,
    held: Counts,
    hashes: Words,
    start: Scalar,
    end: Scalar,
    slot: Scalar,
    tier: Scalar,
) -> Scalar:
    """Take back a membership of hashes[start:end]; return how far it came: less than all where `lacks_room`.

    Does here what takes no record, as `store`.
    """
    secret, capacity = records[0, 0], table.shape[0]
    member, guess = np.uint64((slot << 2 | tier) + 1), np.uint64((slot << 2 | PREDICTED) + 1)
    for number in range(start, end):
        if (number - start) & (FETCHED - 1) == 0 and fetch(table, hashes, number, end, secret) < 0:
            return number
        key = hashes[number]
        at = home_of(key, secret, capacity)
        while table[at, 1] != _ZERO and table[at, 0] != key:
            at += 1
            if at == capacity:
                at = 0
        word = table[at, 1]
        if word >= IS_RECORD:
            if lacks_room(table, records, pool, state):
                return number
            _take(table, interned, records, pool, state, held, key, slot, tier)
            continue
        if is_in(word, member):
            word = minus(word, member)
            held[slot] -= 1
        if tier == DEVICE and is_in(word, guess):
            word = minus(word, guess)
            held[slot] -= 1
        if word == _ZERO and table[at, 1] != _ZERO:
            erase(table, at, secret)
            state[NUM_BLOCKS] -= 1
        elif word != _ZERO:
            table[at, 1] = word
    return end


@compiled(f"int64({TABLE}, {SETS}, {STATE}, {TABLE}, {WORDS}, int64, int64, int64)")
def predict(
    table: Words,
    interned: Words,
    records: Words,
    pool: Words,
    state: Counts,
    held: Counts,
    guesses: Words,
    hashes: Words,
    start: Scalar,
    slot: Scalar,
    deadline: Scalar,
) -> Scalar:
    """Guess that hashes[start:] come to the slot's device, until the deadline; return how far it came.

    guesses: a table from block and slot to the deadline.
    """
    real = np.uint64((slot << 2 | DEVICE) + 1)
    for number in range(start, hashes.shape[0]):
        if lacks_room(table, records, pool, state) or state[NUM_GUESSES] + 1 > MAX_LOAD * guesses.shape[0]:
            return number
        word = table[probe(table, hashes[number], records[0, 0]), 1]
        if has_member(word, real, records, pool, state):
            continue
        _put(table, interned, records, pool, state, held, hashes[number], slot, PREDICTED)
        key = pair_key(hashes[number], slot, records[0, 1])
        at = probe(guesses, key, records[0, 0])
        state[NUM_GUESSES] += np.int64(guesses[at, 1] == _ZERO)
        guesses[at, 0] = key
        guesses[at, 1] = np.uint64(deadline)
    return hashes.shape[0]


@compiled(f"int64({TABLE}, {SETS}, {STATE}, {TABLE}, {WORDS}, int64, int64, int64)")
def expire(
    table: Words,
    interned: Words,
    records: Words,
    pool: Words,
    state: Counts,
    held: Counts,
    guesses: Words,
    hashes: Words,
    start: Scalar,
    slot: Scalar,
    now: Scalar,
) -> Scalar:
    """Take back the guesses about hashes[start:] whose deadline has come; return how far it came."""
    for number in range(start, hashes.shape[0]):
        if lacks_room(table, records, pool, state):
            return number
        at = probe(guesses, pair_key(hashes[number], slot, records[0, 1]), records[0, 0])
        if guesses[at, 1] == _ZERO or guesses[at, 1] > np.uint64(now):
            continue
        erase(guesses, at, records[0, 0])
        state[NUM_GUESSES] -= 1
        _take(table, interned, records, pool, state, held, hashes[number], slot, PREDICTED)
    return hashes.shape[0]


@compiled(f"int64({TABLE}, {SETS}, {STATE}, int64)")
def clear(
    table: Words, interned: Words, records: Words, pool: Words, state: Counts, held: Counts, slot: Scalar
) -> Scalar:
    """Take back all memberships of a slot; return how far it came: the capacity when done, else it begins anew."""
    at = 0
    while at < table.shape[0] and held[slot] > 0:
        if lacks_room(table, records, pool, state):
            return at
        word = table[at, 1]
        if not has_slot(word, slot, records, pool, state):
            at += 1
            continue
        for tier in range(4):
            if word != _ZERO:
                new = discard(word, np.uint64((slot << 2 | tier) + 1), interned, records, pool, state)
                held[slot] -= np.int64(new != word)
                word = new
        if word == _ZERO:
            erase(table, at, records[0, 0])  # what comes after it may have moved here
            state[NUM_BLOCKS] -= 1
        else:
            table[at, 1] = word
            at += 1
    return table.shape[0]


@compiled(f"int64({TABLE}, {SETS}, {STATE}, int64[:,::1], int64, int64, {WORDS})")
def apply(
    table: Words,
    interned: Words,
    records: Words,
    pool: Words,
    state: Counts,
    held: Counts,
    changes: Counts,
    start: Scalar,
    end: Scalar,
    hashes: Words,
) -> Scalar:
    """Apply changes[start:end]; return how far it came: less than all where `lacks_room`.

    changes: [events, 5], as event_reading.BlockChanges has them; FIRST then says where to go on.
    """
    for number in range(start, end):
        kind, first, last = changes[number, KIND], changes[number, FIRST], changes[number, END]
        slot = changes[number, SLOT]
        if kind == STORE:
            at = store(table, interned, records, pool, state, held, hashes, first, last, slot, changes[number, TIER])
        elif kind == REMOVE:
            at = remove(table, interned, records, pool, state, held, hashes, first, last, slot, changes[number, TIER])
        else:
            last = table.shape[0]
            at = clear(table, interned, records, pool, state, held, slot)
        if at < last:
            if kind == STORE or kind == REMOVE:
                changes[number, FIRST] = at
            return number
    return end


@compiled(f"boolean({TABLE}, {TABLE}, {WORDS}, {STATE}, {WORDS}, int64)")
def holds_first(table: Words, records: Words, pool: Words, state: Counts, hashes: Words, slot: Scalar) -> bool:
    """Whether the slot holds the first of these blocks in any tier, or is guessed to."""
    word = table[probe(table, hashes[0], records[0, 0]), 1]
    return has_slot(word, slot, records, pool, state)


@compiled()
def _mark(depths: npt.NDArray[np.int32], tier: Scalar, column: Scalar, bits: Scalar, depth: Scalar) -> None:
    while bits != _ZERO:
        lowest = bits & (~bits + _ONE)
        depths[tier, (column << 6) + _PLACES[np.int64((lowest * _DE_BRUIJN) >> np.uint64(58))]] = depth
        bits ^= lowest


@compiled()
def _narrow(active: Words, planes: Words, depths: npt.NDArray[np.int32], depth: Scalar) -> bool:
    """Keep the workers that hold this block too; who falls out of a tier goes on in the next. Return if any is left."""
    left = _ZERO
    for column in range(active.shape[1]):
        fallen = _ZERO
        holds = planes[PREDICTED, column]
        for tier in range(NUM_TIERS):
            holds |= planes[tier, column]
            candidates = active[tier, column] | fallen
            fallen = candidates & ~holds
            active[tier, column] = candidates & holds
            left |= candidates & holds
            if fallen != _ZERO and depth > 0:
                _mark(depths, tier, column, fallen, depth)
    return left != _ZERO


@compiled(f"int64({TABLE}, {TABLE}, {WORDS}, {TABLE}, {WORDS}, int32[:,::1])")
def match(
    table: Words, records: Words, pool: Words, scratch: Words, hashes: Words, depths: npt.NDArray[np.int32]
) -> Scalar:
    """Write how many blocks from the start each slot holds; return how many blocks were looked at.

    depths: [3 tiers, width * 64]. scratch: [7, width].
    """
    active, planes = scratch[:3], scratch[3:]
    depths[:] = 0
    for column in range(scratch.shape[1]):
        active[0, column], active[1, column], active[2, column] = _ALL, _ZERO, _ZERO
    last = _ZERO
    number = 0
    while number < hashes.shape[0]:
        if number & (FETCHED - 1) == 0 and fetch(table, hashes, number, hashes.shape[0], records[0, 0]) < 0:
            break
        word = table[probe(table, hashes[number], records[0, 0]), 1]
        if word == _ZERO:
            break
        if word != last:
            load_planes(word, planes, records, pool)
            if not _narrow(active, planes, depths, number):
                return number + 1
            last = word
        number += 1
    load_planes(_ZERO, planes, records, pool)
    _narrow(active, planes, depths, number)
    return number
