"""Reads KV event batches off the wire in one compiled call: msgpack (event_wire.py) to columns of changes.

Only the plain form is read, as bireme and vLLM write it; whatever looks otherwise, right or wrong, is left to the
msgpack library (event_reading.py). Nothing outside of a message's bytes is read, whatever they say.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bireme.kv.kernels.compiling import Counts, Scalar, Words, compiled
from bireme.kv.kernels.event_columns import (
    CHANGES_END,
    CLEAR,
    END,
    FIRST,
    HASHES_END,
    IS_READ,
    KIND,
    RANK,
    REMOVE,
    STORE,
    TIER,
)

Bytes = npt.NDArray[np.uint8]

_NIL = 0xC0
_UINT8, _UINT16, _UINT32, _UINT64 = range(0xCC, 0xD0)
_FLOAT64, _ARRAY16, _ARRAY32 = 0xCB, 0xDC, 0xDD


@compiled()
def _number(data: Bytes, at: Scalar, size: Scalar) -> Scalar:
    """Return the big-endian number of `size` bytes."""
    value = np.uint64(0)
    for place in range(size):
        value = value << np.uint64(8) | np.uint64(data[at + place])
    return value


@compiled()
def _word(data: Bytes, at: Scalar) -> Scalar:
    """Return the big-endian number of 8 bytes: written so, and with unsigned places, this is one instruction or two."""
    first = np.uint64(at)
    return (
        np.uint64(data[first]) << np.uint64(56)
        | np.uint64(data[first + np.uint64(1)]) << np.uint64(48)
        | np.uint64(data[first + np.uint64(2)]) << np.uint64(40)
        | np.uint64(data[first + np.uint64(3)]) << np.uint64(32)
        | np.uint64(data[first + np.uint64(4)]) << np.uint64(24)
        | np.uint64(data[first + np.uint64(5)]) << np.uint64(16)
        | np.uint64(data[first + np.uint64(6)]) << np.uint64(8)
        | np.uint64(data[first + np.uint64(7)])
    )


@compiled()
def _uint_size(data: Bytes, at: Scalar, end: Scalar) -> Scalar:
    """Return how many bytes the unsigned number takes that begins here; 0: there is none."""
    if at >= end:
        return 0
    tag = np.int64(data[at])
    size = 1 if tag < 0x80 else 1 + (1 << (tag - _UINT8)) if _UINT8 <= tag <= _UINT64 else 0
    return size if at + size <= end else 0


@compiled()
def _uint(data: Bytes, at: Scalar, size: Scalar) -> Scalar:
    """Return the unsigned number of which `_uint_size` has told the size."""
    return np.uint64(data[at]) if size == 1 else _number(data, at + 1, size - 1)


@compiled()
def _array_size(data: Bytes, at: Scalar, end: Scalar) -> Scalar:
    """Return how many bytes the head of an array takes that begins here; 0: there is none."""
    if at >= end:
        return 0
    tag = np.int64(data[at])
    size = 1 if 0x90 <= tag < 0xA0 else 3 if tag == _ARRAY16 else 5 if tag == _ARRAY32 else 0
    return size if at + size <= end else 0


@compiled()
def _array_length(data: Bytes, at: Scalar, size: Scalar) -> Scalar:
    return np.int64(data[at]) - 0x90 if size == 1 else np.int64(_number(data, at + 1, size - 1))


@compiled()
def _plain_size(data: Bytes, at: Scalar, end: Scalar) -> Scalar:
    """Return how many bytes a nil, an unsigned number or a short string takes that begins here; 0: there is none."""
    if at >= end:
        return 0
    tag = np.int64(data[at])
    size = 1 if tag == _NIL else tag - 0x9F if 0xA0 <= tag < 0xC0 else _uint_size(data, at, end)
    return size if at + size <= end else 0


@compiled()
def _hashes_end(data: Bytes, at: Scalar, end: Scalar, hashes: Words, num_hashes: Scalar) -> tuple[Scalar, Scalar]:
    """Write an array of hashes that begins here; return where it ends, or 0, and the number of hashes with them."""
    size = _array_size(data, at, end)
    if size == 0:
        return 0, num_hashes
    length = _array_length(data, at, size)
    at += size
    for _ in range(length):
        if at + 9 <= end and data[np.uint64(at)] == _UINT64:
            hashes[num_hashes] = _word(data, at + 1)
            at += 9
        else:
            size = _uint_size(data, at, end)
            if size == 0:
                return 0, num_hashes
            hashes[num_hashes] = _uint(data, at, size)
            at += size
        num_hashes += 1
    return at, num_hashes


@compiled()
def _tokens_end(data: Bytes, at: Scalar, end: Scalar) -> Scalar:
    """Return where an array of unsigned numbers ends that begins here, or 0."""
    size = _array_size(data, at, end)
    if size == 0:
        return 0
    length = _array_length(data, at, size)
    at += size
    for _ in range(length):
        if at + 3 <= end and data[np.uint64(at)] == _UINT16:
            at += 3
        elif at + 5 <= end and data[np.uint64(at)] == _UINT32:
            at += 5
        else:
            size = _uint_size(data, at, end)
            if size == 0:
                return 0
            at += size
    return at


@compiled()
def _is_text(data: Bytes, at: Scalar, end: Scalar, low: Scalar, high: Scalar) -> Scalar:
    """Whether the short string that begins here has these first eight and last eight bytes, of at least eight."""
    size = np.int64(data[at]) - 0xA0
    if size < 8 or at + 1 + size > end:
        return False
    return _word(data, at + 1) == low and _word(data, at + size - 7) == high


@compiled()
def _tier(data: Bytes, at: Scalar, size: Scalar) -> Scalar:
    """Return the tier of a medium, of which `_plain_size` has told the size; -1: it is none of ours."""
    if data[at] == _NIL:
        return 0
    value = _number(data, at, size) if size <= 5 else np.uint64(0)
    if value == _GPU:
        return 0
    if value == _CPU:
        return 1
    return 2 if value == _DISK else -1


def _text(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text, "big"))


_GPU, _CPU, _DISK = (_text(bytes([0xA0 + len(name)]) + name) for name in (b"GPU", b"CPU", b"DISK"))
_STORED_LOW, _STORED_HIGH = _text(b"BlockSto"), _text(b"ckStored")
_REMOVED_LOW, _REMOVED_HIGH = _text(b"BlockRem"), _text(b"kRemoved")
_CLEARED_LOW, _CLEARED_HIGH = _text(b"AllBlock"), _text(b"sCleared")


@compiled()
def _kind(data: Bytes, at: Scalar, end: Scalar, num_fields: Scalar) -> Scalar:
    """Return the kind of an event of so many fields, whose name begins here; -1: none that is plain."""
    if data[at] == 0xAB and num_fields >= 5 and _is_text(data, at, end, _STORED_LOW, _STORED_HIGH):
        return STORE
    if data[at] == 0xAC and num_fields >= 2 and _is_text(data, at, end, _REMOVED_LOW, _REMOVED_HIGH):
        return REMOVE
    return CLEAR if data[at] == 0xB0 and _is_text(data, at, end, _CLEARED_LOW, _CLEARED_HIGH) else -1


@compiled()
def _medium(kind: Scalar) -> Scalar:
    """Return which field is the medium; 0: it has none."""
    return 6 if kind == STORE else 2 if kind == REMOVE else 0


@compiled()
def _is_plain(kind: Scalar, field: Scalar, tag: Scalar) -> Scalar:
    """Whether a field of this kind of event may begin with the tag of a nil, a number or a text."""
    is_text = 0xA0 <= tag < 0xC0
    if field == _medium(kind):
        return tag == _NIL or is_text
    if kind != STORE:
        return True
    if field == 4:
        return tag != _NIL and not is_text
    return not is_text or (field != 2 and field != 5)


@compiled()
def _event_end(
    data: Bytes, at: Scalar, end: Scalar, changes: Counts, number: Scalar, hashes: Words, num_hashes: Scalar
) -> tuple[Scalar, Scalar]:
    """Write the event that begins here as changes[number]; return where it ends, or 0, and the number of hashes.

    One function: each branch is a field's own rule, and the place in the message passes through all of them.
    """
    size = _array_size(data, at, end)
    if size == 0:
        return 0, num_hashes
    num_fields = _array_length(data, at, size)
    at += size
    if num_fields == 0 or at >= end or not 0xA8 <= data[at] < 0xC0:
        return 0, num_hashes
    first, kind = num_hashes, _kind(data, at, end, num_fields)
    if kind < 0:
        return 0, num_hashes
    medium = _medium(kind)
    at += np.int64(data[at]) - 0x9F
    tier = 0
    for field in range(1, num_fields):
        if field == 1 and kind != CLEAR:
            at, num_hashes = _hashes_end(data, at, end, hashes, num_hashes)
        elif field == 3 and kind == STORE:
            at = _tokens_end(data, at, end)
        else:
            size = _plain_size(data, at, end)
            if size == 0 or not _is_plain(kind, field, data[at]):
                return 0, num_hashes
            if field == medium:
                tier = _tier(data, at, size)
                if tier < 0:
                    return 0, num_hashes
            at += size
        if at == 0:
            return 0, num_hashes
    changes[number, KIND], changes[number, TIER] = kind, tier
    changes[number, FIRST], changes[number, END] = first, num_hashes
    return at, num_hashes


@compiled("void(Array(uint8, 1, 'C', readonly=True), int64[::1], int64[:,::1], uint64[::1], int64[:,::1], uint64[::1])")
def read_batches(data: Bytes, ends: Counts, batches: Counts, times: Words, changes: Counts, hashes: Words) -> None:
    """Read the messages data[:ends[0]], data[ends[0]:ends[1]], ...

    Written are, a message: batches [messages, 4], of which IS_READ is 0 for those that are left to others, and the bits
    of its time; an event: changes [events, 4]; a block: its hash. These have room for len(data) / MIN_EVENT_BYTES
    events and len(data) blocks. One function: every message that can't be read is left at its own place.
    """
    begin, num_changes, num_hashes = 0, 0, 0
    for number in range(ends.shape[0]):
        end = ends[number]
        at, count, blocks = begin, num_changes, num_hashes
        begin = end
        batches[number, IS_READ], batches[number, RANK] = 0, -1
        batches[number, CHANGES_END], batches[number, HASHES_END] = num_changes, num_hashes
        if at + 11 > end or data[at] != 0x93 or data[at + 1] != _FLOAT64:
            continue
        times[number] = _word(data, at + 2)
        at += 10
        size = _array_size(data, at, end)
        if size == 0:
            continue
        num_events = _array_length(data, at, size)
        at += size
        for _ in range(num_events):
            at, blocks = _event_end(data, at, end, changes, count, hashes, blocks)
            if at == 0:
                break
            count += 1
        if at == 0 or at >= end:
            continue
        size = 1 if data[at] == _NIL else _uint_size(data, at, end)
        if size == 0 or at + size != end:
            continue
        if data[at] != _NIL:
            rank = _uint(data, at, size)
            if rank > np.uint64(1 << 62):
                continue
            batches[number, RANK] = np.int64(rank)
        num_changes, num_hashes = count, blocks
        batches[number, IS_READ] = 1
        batches[number, CHANGES_END], batches[number, HASHES_END] = num_changes, num_hashes
