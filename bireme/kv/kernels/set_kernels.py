"""Sets of memberships, of which each block of the prefix index has one (index_kernels.py).

*Word*: a set. A membership is a worker's slot and a tier, as the number (slot << 2 | tier) + 1. Up to four of them
stand in the word, 15 bits each, ascending from the lowest; more are a *record*, shared by all blocks with the same set,
and the word is its number with the highest bit set. So two blocks have the same holders exactly when their words are
equal.

*Record*: uint64 [4] of (hash of the set, references, offset in the pool, members | members not on a device << 32). The
pool holds its bits: `width` words of slots on a device, and where there are others, `width` for each of the other
tiers. A table from the hash to the record finds equal sets. Record 0 is none: its first words are the secrets.
"""

from __future__ import annotations

import numpy as np

from bireme.kv.kernels.compiling import Counts, Scalar, Words, compiled
from bireme.kv.kernels.table_kernels import MAX_LOAD, STATE, TABLE, WORDS, erase, mixed, probe

MAX_INLINE = 4

# Places in `state`, int64: what the arrays of an index hold now.
NUM_BLOCKS, NUM_RECORDS, NEXT_RECORD, FREE_RECORD, NEXT_WORD, FREE_PLAIN, FREE_TIERED, WIDTH, NUM_GUESSES = range(9)
STATE_SIZE = 9

SETS = f"{TABLE}, {TABLE}, {WORDS}, {STATE}"  # interned, records, pool, state
IS_RECORD = np.uint64(1 << 63)
FULL = np.uint64(1 << 45)  # a word from here on holds four members

_ZERO, _ONE = np.uint64(0), np.uint64(1)
_MEMBER_BITS = np.uint64(15)
_MEMBER_MASK = np.uint64((1 << 15) - 1)
_RECORD_MASK = np.uint64((1 << 63) - 1)
_HALF = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)
_OTHER = np.uint64((1 << 32) + 1)
_SIX, _SIXTY_THREE = np.uint64(6), np.uint64(63)


@compiled()
def _bit_of(member: Scalar, offset: Scalar, width: Scalar) -> Scalar:
    """Return the pool's word that holds a member's bit."""
    slot, tier = (member - _ONE) >> np.uint64(2), (member - _ONE) & np.uint64(3)
    return np.int64(offset + tier * np.uint64(width) + (slot >> _SIX))


@compiled()
def _mask_of(member: Scalar) -> Scalar:
    return _ONE << (((member - _ONE) >> np.uint64(2)) & _SIXTY_THREE)


@compiled()
def _is_other(member: Scalar) -> bool:
    """Whether a member's tier is not the device."""
    return ((member - _ONE) & np.uint64(3)) != _ZERO


@compiled()
def is_in(word: Scalar, member: Scalar) -> bool:
    """Whether a word that is no record has the member."""
    while word != _ZERO:
        if word & _MEMBER_MASK == member:
            return True
        word >>= _MEMBER_BITS
    return False


@compiled()
def plus(word: Scalar, member: Scalar) -> Scalar:
    """Return the word of at most three members with one more."""
    low, shift = _ZERO, _ZERO
    while word != _ZERO and word & _MEMBER_MASK < member:
        low |= (word & _MEMBER_MASK) << shift
        word >>= _MEMBER_BITS
        shift += _MEMBER_BITS
    return low | member << shift | word << (shift + _MEMBER_BITS)


@compiled()
def minus(word: Scalar, member: Scalar) -> Scalar:
    """Return the word, which has the member and is no record, without it."""
    low, shift = _ZERO, _ZERO
    while word & _MEMBER_MASK != member:
        low |= (word & _MEMBER_MASK) << shift
        word >>= _MEMBER_BITS
        shift += _MEMBER_BITS
    return low | (word >> _MEMBER_BITS) << shift


@compiled()
def has_member(word: Scalar, member: Scalar, records: Words, pool: Words, state: Counts) -> bool:
    if word >= IS_RECORD:
        record = np.int64(word & _RECORD_MASK)
        if _is_other(member) and (records[record, 3] >> _HALF) == _ZERO:
            return False
        return (pool[_bit_of(member, records[record, 2], state[WIDTH])] & _mask_of(member)) != _ZERO
    return is_in(word, member)


@compiled()
def has_slot(word: Scalar, slot: Scalar, records: Words, pool: Words, state: Counts) -> bool:
    """Whether the slot holds the block in any tier, or is guessed to."""
    if word < IS_RECORD:
        while word != _ZERO:
            if ((word & _MEMBER_MASK) - _ONE) >> np.uint64(2) == np.uint64(slot):
                return True
            word >>= _MEMBER_BITS
        return False
    record = np.int64(word & _RECORD_MASK)
    merged, offset = _ZERO, np.int64(records[record, 2]) + (slot >> 6)
    for tier in range(4 if (records[record, 3] >> _HALF) != _ZERO else 1):
        merged |= pool[offset + tier * state[WIDTH]]
    return (merged >> (np.uint64(slot) & _SIXTY_THREE)) & _ONE != _ZERO


@compiled(f"boolean({TABLE}, {TABLE}, {WORDS}, {STATE})")
def lacks_room(table: Words, records: Words, pool: Words, state: Counts) -> bool:
    """Whether the next operation on one block might not fit: it makes two records at most, of four planes each."""
    return (
        state[NUM_BLOCKS] + 1 > MAX_LOAD * table.shape[0]
        or state[NUM_RECORDS] + 3 > records.shape[0]
        or state[NEXT_WORD] + 8 * state[WIDTH] > pool.shape[0]
    )


@compiled()
def _new_record(members: Scalar, records: Words, pool: Words, state: Counts) -> Scalar:
    """Return a record with zeroed planes, without a hash or references."""
    record = state[FREE_RECORD]
    if record:
        state[FREE_RECORD] = np.int64(records[record, 0])
    else:
        record = state[NEXT_RECORD]
        state[NEXT_RECORD] += 1
    is_tiered = (members >> _HALF) != _ZERO
    num_words = 4 * state[WIDTH] if is_tiered else state[WIDTH]
    free = FREE_TIERED if is_tiered else FREE_PLAIN
    offset = state[free] - 1
    if offset >= 0:
        state[free] = np.int64(pool[offset])
    else:
        offset = state[NEXT_WORD]
        state[NEXT_WORD] += num_words
    for at in range(offset, offset + num_words):
        pool[at] = _ZERO
    records[record, 1] = _ZERO
    records[record, 2] = np.uint64(offset)
    records[record, 3] = members
    state[NUM_RECORDS] += 1
    return record


@compiled()
def _release(record: Scalar, interned: Words, records: Words, pool: Words, state: Counts) -> None:
    """Take back one reference; without any the record is free."""
    records[record, 1] -= _ONE
    if records[record, 1] != _ZERO:
        return
    secret = records[0, 0]
    erase(interned, probe(interned, records[record, 0], secret), secret)
    offset = np.int64(records[record, 2])
    free = FREE_TIERED if (records[record, 3] >> _HALF) != _ZERO else FREE_PLAIN
    pool[offset] = np.uint64(state[free])
    state[free] = offset + 1
    records[record, 0] = np.uint64(state[FREE_RECORD])
    state[FREE_RECORD] = record
    state[NUM_RECORDS] -= 1


@compiled()
def _with_hash(record: Scalar, key: Scalar, interned: Words, records: Words) -> Scalar:
    at = probe(interned, key, records[0, 0])
    interned[at, 0] = key
    interned[at, 1] = np.uint64(record)
    records[record, 0] = key
    records[record, 1] = _ONE
    return IS_RECORD | np.uint64(record)


@compiled()
def _known(key: Scalar, interned: Words, records: Words) -> Scalar:
    """Return the word of the record with this hash, with one reference more, or 0."""
    record = interned[probe(interned, key, records[0, 0]), 1]
    if record == _ZERO:
        return _ZERO
    records[np.int64(record), 1] += _ONE
    return IS_RECORD | record


@compiled()
def _changed_record(
    word: Scalar, member: Scalar, members: Scalar, interned: Words, records: Words, pool: Words, state: Counts
) -> Scalar:
    """Return the word of a record's set with the member flipped; `members` counts those of the result."""
    old = np.int64(word & _RECORD_MASK)
    key = records[old, 0] ^ mixed(member, records[0, 1])
    found = _known(key, interned, records)
    if found == _ZERO:
        record = _new_record(members, records, pool, state)
        start, offset = np.int64(records[record, 2]), np.int64(records[old, 2])
        num_planes = 4 if (members >> _HALF) != _ZERO and (records[old, 3] >> _HALF) != _ZERO else 1
        for at in range(num_planes * state[WIDTH]):
            pool[start + at] = pool[offset + at]
        if not _is_other(member) or (members >> _HALF) != _ZERO:  # else its plane went with it
            pool[_bit_of(member, records[record, 2], state[WIDTH])] ^= _mask_of(member)
        found = _with_hash(record, key, interned, records)
    _release(old, interned, records, pool, state)
    return found


@compiled()
def add(word: Scalar, member: Scalar, interned: Words, records: Words, pool: Words, state: Counts) -> Scalar:
    """Return the word of the set with the member."""
    if has_member(word, member, records, pool, state):
        return word
    count = _OTHER if _is_other(member) else _ONE
    if word >= IS_RECORD:
        members = records[np.int64(word & _RECORD_MASK), 3] + count
        return _changed_record(word, member, members, interned, records, pool, state)
    if word < FULL:
        return plus(word, member)
    key, rest = mixed(member, records[0, 1]), word
    while rest != _ZERO:
        one = rest & _MEMBER_MASK
        key ^= mixed(one, records[0, 1])
        count += _OTHER if _is_other(one) else _ONE
        rest >>= _MEMBER_BITS
    found = _known(key, interned, records)
    if found != _ZERO:
        return found
    record = _new_record(count, records, pool, state)
    rest = word
    while rest != _ZERO:
        one = rest & _MEMBER_MASK
        pool[_bit_of(one, records[record, 2], state[WIDTH])] |= _mask_of(one)
        rest >>= _MEMBER_BITS
    pool[_bit_of(member, records[record, 2], state[WIDTH])] |= _mask_of(member)
    return _with_hash(record, key, interned, records)


@compiled()
def _inline(record: Scalar, without: Scalar, records: Words, pool: Words, state: Counts) -> Scalar:
    """Return the word of a record's members, at most four besides `without`."""
    word = _ZERO
    width = state[WIDTH]
    num_tiers = 4 if (records[record, 3] >> _HALF) != _ZERO else 1
    for column in range(width - 1, -1, -1):
        merged = _ZERO
        for tier in range(num_tiers):
            merged |= pool[np.int64(records[record, 2]) + tier * width + column]
        if merged == _ZERO:
            continue
        for bit in range(63, -1, -1):
            if (merged >> np.uint64(bit)) & _ONE == _ZERO:
                continue
            for tier in range(num_tiers - 1, -1, -1):
                bits = pool[np.int64(records[record, 2]) + tier * width + column]
                member = np.uint64((((column << 6) + bit) << 2 | tier) + 1)
                if (bits >> np.uint64(bit)) & _ONE != _ZERO and member != without:
                    word = word << _MEMBER_BITS | member
    return word


@compiled()
def discard(word: Scalar, member: Scalar, interned: Words, records: Words, pool: Words, state: Counts) -> Scalar:
    """Return the word of the set without the member; 0: nobody is left."""
    if not has_member(word, member, records, pool, state):
        return word
    if word < IS_RECORD:
        return minus(word, member)
    record = np.int64(word & _RECORD_MASK)
    members = records[record, 3] - (_OTHER if _is_other(member) else _ONE)
    if members & _LOW > np.uint64(MAX_INLINE):
        return _changed_record(word, member, members, interned, records, pool, state)
    word = _inline(record, member, records, pool, state)
    _release(record, interned, records, pool, state)
    return word


@compiled(f"int64({TABLE}, {TABLE}, int64)")
def pool_words(interned: Words, records: Words, width: Scalar) -> Scalar:
    """Return how many words of the pool all records need with `width` words a plane."""
    num_words = 0
    for at in range(interned.shape[0]):
        if interned[at, 1] != _ZERO:
            is_tiered = (records[np.int64(interned[at, 1]), 3] >> _HALF) != _ZERO
            num_words += 4 * width if is_tiered else width
    return num_words


@compiled(f"void({TABLE}, {TABLE}, {WORDS}, {STATE}, {TABLE}, {TABLE}, {WORDS}, int64)")
def rebuild_sets(
    table: Words,
    records: Words,
    pool: Words,
    state: Counts,
    interned: Words,
    new_records: Words,
    new_pool: Words,
    width: Scalar,
) -> None:
    """Move the records to empty arrays with room for them, one after the other, with `width` words a plane."""
    old_width = state[WIDTH]
    new_records[0, 0] = records[0, 0]
    new_records[0, 1] = records[0, 1]
    state[NUM_RECORDS] = 0
    state[NEXT_RECORD] = 1
    state[FREE_RECORD] = 0
    state[NEXT_WORD] = 0
    state[FREE_PLAIN] = 0
    state[FREE_TIERED] = 0
    state[WIDTH] = width
    for at in range(table.shape[0]):
        if table[at, 1] < IS_RECORD:
            continue
        old = np.int64(table[at, 1] & _RECORD_MASK)
        word = _known(records[old, 0], interned, new_records)
        if word == _ZERO:
            record = _new_record(records[old, 3], new_records, new_pool, state)
            start, offset = np.int64(new_records[record, 2]), np.int64(records[old, 2])
            for tier in range(4 if (records[old, 3] >> _HALF) != _ZERO else 1):
                for column in range(min(width, old_width)):
                    new_pool[start + tier * width + column] = pool[offset + tier * old_width + column]
            word = _with_hash(record, records[old, 0], interned, new_records)
        table[at, 1] = word


@compiled()
def load_planes(word: Scalar, planes: Words, records: Words, pool: Words) -> None:
    """Write the bits of a word's members, [4 tiers, width]."""
    width = planes.shape[1]
    for tier in range(4):
        for column in range(width):
            planes[tier, column] = _ZERO
    if word >= IS_RECORD:
        record = np.int64(word & _RECORD_MASK)
        offset = np.int64(records[record, 2])
        for tier in range(4 if (records[record, 3] >> _HALF) != _ZERO else 1):
            for column in range(width):
                planes[tier, column] = pool[offset + tier * width + column]
        return
    while word != _ZERO:
        member = word & _MEMBER_MASK
        slot = np.int64((member - _ONE) >> np.uint64(2))
        planes[np.int64((member - _ONE) & np.uint64(3)), slot >> 6] |= _mask_of(member)
        word >>= _MEMBER_BITS
