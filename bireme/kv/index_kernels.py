"""Tables and sets of the prefix index in numpy arrays: compiled by numba where it is installed, else plain Python.

*Table*: uint64 [capacity, 2] of (key, word), open addressing with linear probing; a word of 0 is an empty place.
Erasing moves later entries back, so that churn leaves nothing behind. The home of a key depends on a secret odd number:
prompts cannot be chosen so that their blocks crowd together.

*Word*: the set of memberships of one block. A membership is a worker's slot and a tier, as the number
(slot << 2 | tier) + 1. Up to four of them stand in the word, 15 bits each, ascending from the lowest; more are a
*record*, shared by all blocks with the same set, and the word is its number with the highest bit set. So two blocks
have the same holders exactly when their words are equal.

*Record*: uint64 [4] of (hash of the set, references, offset in the pool, members | members not on a device << 32). The
pool holds its bits: `width` words of slots on a device, and where there are others, `width` for each of the other
tiers. A table from the hash to the record finds equal sets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bireme.kv.compiling import Counts, Scalar, Words, compiled

DEVICE, HOST, DISK, PREDICTED = range(4)
NUM_TIERS = 3  # told by events; PREDICTED is a guess about DEVICE
MAX_SLOTS = (1 << 13) - 1
MAX_INLINE = 4

# Places in `state`, int64: what the arrays hold now.
NUM_BLOCKS, NUM_RECORDS, NEXT_RECORD, FREE_RECORD, NEXT_WORD, FREE_PLAIN, FREE_TIERED, WIDTH, NUM_GUESSES = range(9)
STATE_SIZE = 9

_ZERO, _ONE = np.uint64(0), np.uint64(1)
_MEMBER_BITS = np.uint64(15)
_MEMBER_MASK = np.uint64((1 << 15) - 1)
_IS_RECORD = np.uint64(1 << 63)
_RECORD_MASK = np.uint64((1 << 63) - 1)
_FULL = np.uint64(1 << 45)  # a word from here on holds four members
_HALF = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)
_OTHER = np.uint64((1 << 32) + 1)
_ALL = np.uint64((1 << 64) - 1)
_SIX, _SIXTY_THREE = np.uint64(6), np.uint64(63)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_MAX_LOAD = 0.8
_FETCHED = 32
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)  # each of its runs of six bits is another number
_PLACES = np.array(
    [place for _, place in sorted((0x03F79D71B4CB0A89 << place & (1 << 64) - 1, place) for place in range(64))]
)

_TABLE, _WORDS, _STATE = "uint64[:,::1]", "uint64[::1]", "int64[::1]"
_SETS = f"{_TABLE}, {_TABLE}, {_WORDS}, {_STATE}"  # interned, records, pool, state


@compiled()
def _home(key: Scalar, secret: Scalar, capacity: Scalar) -> Scalar:
    return np.int64((((key * secret) >> _HALF) * np.uint64(capacity)) >> _HALF)


@compiled()
def _probe(table: Words, key: Scalar, secret: Scalar) -> Scalar:
    """Return the place of the key, or the empty one where it belongs."""
    capacity = table.shape[0]
    at = _home(key, secret, capacity)
    while table[at, 1] != _ZERO and table[at, 0] != key:
        at += 1
        if at == capacity:
            at = 0
    return at


@compiled()
def _fetch(table: Words, hashes: Words, first: Scalar, secret: Scalar) -> Scalar:
    """Read the homes of the next blocks at once, so that what follows need not wait for memory at each of them.

    Returns how many are there: without a use of what is read, the compiler leaves the reading out.
    """
    found: Scalar = 0
    for number in range(first, min(first + _FETCHED, hashes.shape[0])):
        found += np.int64(table[_home(hashes[number], secret, table.shape[0]), 0] == hashes[number])
    return found


@compiled()
def _erase(table: Words, at: Scalar, secret: Scalar) -> None:
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
            home = _home(table[later, 0], secret, capacity)
            if (later - home) % capacity >= (later - at) % capacity:
                break
        table[at, 0] = table[later, 0]
        table[at, 1] = table[later, 1]
        at = later


@compiled()
def _set_hash(member: Scalar, secret: Scalar) -> Scalar:
    """Return a member's part of the hash of a set: splitmix64's last step."""
    mixed = member * np.uint64(0x9E3779B97F4A7C15) + secret
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MIX_2
    return mixed ^ (mixed >> _SHIFT_3)


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
def _holds(word: Scalar, member: Scalar, records: Words, pool: Words, state: Counts) -> bool:
    if word >= _IS_RECORD:
        record = np.int64(word & _RECORD_MASK)
        if _is_other(member) and (records[record, 3] >> _HALF) == _ZERO:
            return False
        return (pool[_bit_of(member, records[record, 2], state[WIDTH])] & _mask_of(member)) != _ZERO
    while word != _ZERO:
        if word & _MEMBER_MASK == member:
            return True
        word >>= _MEMBER_BITS
    return False


@compiled()
def _has_slot(word: Scalar, slot: Scalar, records: Words, pool: Words, state: Counts) -> bool:
    """Whether the slot holds the block in any tier, or is guessed to."""
    if word < _IS_RECORD:
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


@compiled(f"boolean({_TABLE}, {_TABLE}, {_WORDS}, {_STATE})")
def lacks_room(table: Words, records: Words, pool: Words, state: Counts) -> bool:
    """Whether the next operation on one block might not fit: it makes two records at most, of four planes each."""
    return (
        state[NUM_BLOCKS] + 1 > _MAX_LOAD * table.shape[0]
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
    _erase(interned, _probe(interned, records[record, 0], secret), secret)
    offset = np.int64(records[record, 2])
    free = FREE_TIERED if (records[record, 3] >> _HALF) != _ZERO else FREE_PLAIN
    pool[offset] = np.uint64(state[free])
    state[free] = offset + 1
    records[record, 0] = np.uint64(state[FREE_RECORD])
    state[FREE_RECORD] = record
    state[NUM_RECORDS] -= 1


@compiled()
def _with_hash(record: Scalar, key: Scalar, interned: Words, records: Words) -> Scalar:
    at = _probe(interned, key, records[0, 0])
    interned[at, 0] = key
    interned[at, 1] = np.uint64(record)
    records[record, 0] = key
    records[record, 1] = _ONE
    return _IS_RECORD | np.uint64(record)


@compiled()
def _known(key: Scalar, interned: Words, records: Words) -> Scalar:
    """Return the word of the record with this hash, with one reference more, or 0."""
    record = interned[_probe(interned, key, records[0, 0]), 1]
    if record == _ZERO:
        return _ZERO
    records[np.int64(record), 1] += _ONE
    return _IS_RECORD | record


@compiled()
def _changed_record(
    word: Scalar, member: Scalar, members: Scalar, interned: Words, records: Words, pool: Words, state: Counts
) -> Scalar:
    """Return the word of a record's set with the member flipped; `members` counts those of the result."""
    old = np.int64(word & _RECORD_MASK)
    key = records[old, 0] ^ _set_hash(member, records[0, 1])
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
def _add(word: Scalar, member: Scalar, interned: Words, records: Words, pool: Words, state: Counts) -> Scalar:
    """Return the word of the set with the member."""
    if _holds(word, member, records, pool, state):
        return word
    count = _OTHER if _is_other(member) else _ONE
    if word >= _IS_RECORD:
        members = records[np.int64(word & _RECORD_MASK), 3] + count
        return _changed_record(word, member, members, interned, records, pool, state)
    if word < _FULL:
        low, shift = _ZERO, _ZERO
        while word != _ZERO and word & _MEMBER_MASK < member:
            low |= (word & _MEMBER_MASK) << shift
            word >>= _MEMBER_BITS
            shift += _MEMBER_BITS
        return low | member << shift | word << (shift + _MEMBER_BITS)
    key, rest = _set_hash(member, records[0, 1]), word
    while rest != _ZERO:
        one = rest & _MEMBER_MASK
        key ^= _set_hash(one, records[0, 1])
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
def _discard(word: Scalar, member: Scalar, interned: Words, records: Words, pool: Words, state: Counts) -> Scalar:
    """Return the word of the set without the member; 0: nobody is left."""
    if not _holds(word, member, records, pool, state):
        return word
    if word < _IS_RECORD:
        low, shift = _ZERO, _ZERO
        while word & _MEMBER_MASK != member:
            low |= (word & _MEMBER_MASK) << shift
            word >>= _MEMBER_BITS
            shift += _MEMBER_BITS
        return low | (word >> _MEMBER_BITS) << shift
    record = np.int64(word & _RECORD_MASK)
    members = records[record, 3] - (_OTHER if _is_other(member) else _ONE)
    if members & _LOW > np.uint64(MAX_INLINE):
        return _changed_record(word, member, members, interned, records, pool, state)
    word = _inline(record, member, records, pool, state)
    _release(record, interned, records, pool, state)
    return word


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
    at = _probe(table, key, records[0, 0])
    word, member = table[at, 1], np.uint64((slot << 2 | tier) + 1)
    if word == _ZERO:
        table[at, 0] = key
        table[at, 1] = member
        state[NUM_BLOCKS] += 1
        held[slot] += 1
        return
    new = _add(word, member, interned, records, pool, state)
    held[slot] += np.int64(new != word)
    guess = np.uint64((slot << 2 | PREDICTED) + 1)
    if tier != PREDICTED and _holds(new, guess, records, pool, state):
        new = _discard(new, guess, interned, records, pool, state)
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
    at = _probe(table, key, records[0, 0])
    word = table[at, 1]
    if word == _ZERO:
        return
    new = _discard(word, np.uint64((slot << 2 | tier) + 1), interned, records, pool, state)
    held[slot] -= np.int64(new != word)
    guess = np.uint64((slot << 2 | PREDICTED) + 1)
    if tier == DEVICE and _holds(new, guess, records, pool, state):
        new = _discard(new, guess, interned, records, pool, state)
        held[slot] -= 1
    if new == _ZERO:
        _erase(table, at, records[0, 0])
        state[NUM_BLOCKS] -= 1
    else:
        table[at, 1] = new


@compiled(f"int64({_TABLE}, {_SETS}, {_STATE}, {_WORDS}, int64, int64, int64)")
def store(
    table: Words,
    interned: Words,
    records: Words,
    pool: Words,
    state: Counts,
    held: Counts,
    hashes: Words,
    start: Scalar,
    slot: Scalar,
    tier: Scalar,
) -> Scalar:
    """Add a membership of hashes[start:]; return how far it came: less than all where `lacks_room`."""
    for number in range(start, hashes.shape[0]):
        if (number - start) % _FETCHED == 0 and _fetch(table, hashes, number, records[0, 0]) < 0:
            return number
        if lacks_room(table, records, pool, state):
            return number
        _put(table, interned, records, pool, state, held, hashes[number], slot, tier)
    return hashes.shape[0]


@compiled(f"int64({_TABLE}, {_SETS}, {_STATE}, {_WORDS}, int64, int64, int64)")
def remove(
    table: Words,
    interned: Words,
    records: Words,
    pool: Words,
    state: Counts,
    held: Counts,
    hashes: Words,
    start: Scalar,
    slot: Scalar,
    tier: Scalar,
) -> Scalar:
    """Take back a membership of hashes[start:]; return how far it came: less than all where `lacks_room`."""
    for number in range(start, hashes.shape[0]):
        if (number - start) % _FETCHED == 0 and _fetch(table, hashes, number, records[0, 0]) < 0:
            return number
        if lacks_room(table, records, pool, state):
            return number
        _take(table, interned, records, pool, state, held, hashes[number], slot, tier)
    return hashes.shape[0]


@compiled()
def _guess_key(key: Scalar, slot: Scalar, secret: Scalar) -> Scalar:
    return key ^ _set_hash(np.uint64(slot + 1), secret)


@compiled(f"int64({_TABLE}, {_SETS}, {_STATE}, {_TABLE}, {_WORDS}, int64, int64, int64)")
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
        if lacks_room(table, records, pool, state) or state[NUM_GUESSES] + 1 > _MAX_LOAD * guesses.shape[0]:
            return number
        word = table[_probe(table, hashes[number], records[0, 0]), 1]
        if _holds(word, real, records, pool, state):
            continue
        _put(table, interned, records, pool, state, held, hashes[number], slot, PREDICTED)
        key = _guess_key(hashes[number], slot, records[0, 1])
        at = _probe(guesses, key, records[0, 0])
        state[NUM_GUESSES] += np.int64(guesses[at, 1] == _ZERO)
        guesses[at, 0] = key
        guesses[at, 1] = np.uint64(deadline)
    return hashes.shape[0]


@compiled(f"int64({_TABLE}, {_SETS}, {_STATE}, {_TABLE}, {_WORDS}, int64, int64, int64)")
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
        at = _probe(guesses, _guess_key(hashes[number], slot, records[0, 1]), records[0, 0])
        if guesses[at, 1] == _ZERO or guesses[at, 1] > np.uint64(now):
            continue
        _erase(guesses, at, records[0, 0])
        state[NUM_GUESSES] -= 1
        _take(table, interned, records, pool, state, held, hashes[number], slot, PREDICTED)
    return hashes.shape[0]


@compiled(f"int64({_TABLE}, {_SETS}, {_STATE}, int64, int64)")
def clear(
    table: Words, interned: Words, records: Words, pool: Words, state: Counts, held: Counts, start: Scalar, slot: Scalar
) -> Scalar:
    """Take back all memberships of a slot, from place `start` on; return how far it came: the capacity when done."""
    at = start
    while at < table.shape[0] and held[slot] > 0:
        if lacks_room(table, records, pool, state):
            return at
        word = table[at, 1]
        if not _has_slot(word, slot, records, pool, state):
            at += 1
            continue
        for tier in range(4):
            if word != _ZERO:
                new = _discard(word, np.uint64((slot << 2 | tier) + 1), interned, records, pool, state)
                held[slot] -= np.int64(new != word)
                word = new
        if word == _ZERO:
            _erase(table, at, records[0, 0])  # what comes after it may have moved here
            state[NUM_BLOCKS] -= 1
        else:
            table[at, 1] = word
            at += 1
    return table.shape[0]


@compiled(f"boolean({_TABLE}, {_TABLE}, {_WORDS}, {_STATE}, {_WORDS}, int64)")
def holds_first(table: Words, records: Words, pool: Words, state: Counts, hashes: Words, slot: Scalar) -> bool:
    """Whether the slot holds the first of these blocks in any tier, or is guessed to."""
    word = table[_probe(table, hashes[0], records[0, 0]), 1]
    return _has_slot(word, slot, records, pool, state)


@compiled(f"int64({_TABLE}, {_TABLE}, {_WORDS}, {_STATE}, {_WORDS}, {_WORDS}, int64)")
def dump(table: Words, records: Words, pool: Words, state: Counts, hashes: Words, tiers: Words, slot: Scalar) -> Scalar:
    """Write the slot's memberships that are no guesses; return how many."""
    count = 0
    for at in range(table.shape[0]):
        if not _has_slot(table[at, 1], slot, records, pool, state):
            continue
        for tier in range(NUM_TIERS):
            if count < hashes.shape[0] and _holds(
                table[at, 1], np.uint64((slot << 2 | tier) + 1), records, pool, state
            ):
                hashes[count] = table[at, 0]
                tiers[count] = np.uint64(tier)
                count += 1
    return count


@compiled(f"void({_TABLE}, {_TABLE}, uint64)")
def rehash(old: Words, new: Words, secret: Scalar) -> None:
    """Move all entries to an empty table that has room for them."""
    for at in range(old.shape[0]):
        if old[at, 1] != _ZERO:
            place = _probe(new, old[at, 0], secret)
            new[place, 0] = old[at, 0]
            new[place, 1] = old[at, 1]


@compiled(f"int64({_TABLE}, {_TABLE}, int64)")
def pool_words(interned: Words, records: Words, width: Scalar) -> Scalar:
    """Return how many words of the pool all records need with `width` words a plane."""
    num_words = 0
    for at in range(interned.shape[0]):
        if interned[at, 1] != _ZERO:
            is_tiered = (records[np.int64(interned[at, 1]), 3] >> _HALF) != _ZERO
            num_words += 4 * width if is_tiered else width
    return num_words


@compiled(f"void({_TABLE}, {_TABLE}, {_WORDS}, {_STATE}, {_TABLE}, {_TABLE}, {_WORDS}, int64)")
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
        if table[at, 1] < _IS_RECORD:
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
def _load_planes(word: Scalar, planes: Words, records: Words, pool: Words) -> None:
    """Write the bits of a word's members, [4 tiers, width]."""
    width = planes.shape[1]
    for tier in range(4):
        for column in range(width):
            planes[tier, column] = _ZERO
    if word >= _IS_RECORD:
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


@compiled(f"int64({_TABLE}, {_TABLE}, {_WORDS}, {_TABLE}, {_WORDS}, int32[:,::1])")
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
        if number % _FETCHED == 0 and _fetch(table, hashes, number, records[0, 0]) < 0:
            break
        word = table[_probe(table, hashes[number], records[0, 0]), 1]
        if word == _ZERO:
            break
        if word != last:
            _load_planes(word, planes, records, pool)
            if not _narrow(active, planes, depths, number):
                return number + 1
            last = word
        number += 1
    _load_planes(_ZERO, planes, records, pool)
    _narrow(active, planes, depths, number)
    return number
