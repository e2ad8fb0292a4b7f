"""XXH3-64 of the blocks of a prompt: what hashing.py computes block by block, for all of them in one compiled call.

The algorithm and its secret are xxHash's (github.com/Cyan4973/xxHash, xxhash.h, XXH3_64bits_withSeed), for inputs of 4
to 240 bytes; longer ones take another path there, which is left to the library.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bireme.kv.compiling import Scalar, Words, compiled

MAX_TOKENS = 60  # of a block: 240 bytes
_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8"
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17"
    "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# Its 64-bit number, little-endian, at each byte.
_SECRET = np.array(
    [int.from_bytes(_SECRET_BYTES[at : at + 8], "little") for at in range(len(_SECRET_BYTES) - 7)], np.uint64
)
_PRIME = np.uint64(0x9E3779B185EBCA87)
_RRMXMX = np.uint64(0x9FB21C651E98DF25)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_CHAIN_SEED = np.uint64(1337)
_LOW = np.uint64((1 << 32) - 1)
_32 = np.uint64(32)


@compiled()
def _fold(one: Scalar, other: Scalar) -> Scalar:
    """Return both halves of the 128-bit product, one over the other."""
    low = (one & _LOW) * (other & _LOW)
    left, right = (one >> _32) * (other & _LOW), (one & _LOW) * (other >> _32)
    middle = (low >> _32) + (left & _LOW) + right
    high = (one >> _32) * (other >> _32) + (left >> _32) + (middle >> _32)
    return high ^ (middle << _32 | low & _LOW)


@compiled()
def _avalanche(mixed: Scalar) -> Scalar:
    mixed = (mixed ^ (mixed >> np.uint64(37))) * _AVALANCHE
    return mixed ^ (mixed >> _32)


@compiled()
def _swapped(value: Scalar) -> Scalar:
    """Return the eight bytes in the other order."""
    value = (value & np.uint64(0x00FF00FF00FF00FF)) << np.uint64(8) | (value >> np.uint64(8)) & np.uint64(
        0x00FF00FF00FF00FF
    )
    value = (value & np.uint64(0x0000FFFF0000FFFF)) << np.uint64(16) | (value >> np.uint64(16)) & np.uint64(
        0x0000FFFF0000FFFF
    )
    return value << _32 | value >> _32


@compiled()
def _pair(tokens: npt.NDArray[np.uint32], at: Scalar) -> Scalar:
    return np.uint64(tokens[at]) | np.uint64(tokens[at + 1]) << _32


@compiled()
def _mix(tokens: npt.NDArray[np.uint32], at: Scalar, secret_at: Scalar, seed: Scalar) -> Scalar:
    low = _pair(tokens, at) ^ (_SECRET[secret_at] + seed)
    return _fold(low, _pair(tokens, at + 2) ^ (_SECRET[secret_at + 8] - seed))


@compiled()
def _two_words(low: Scalar, high: Scalar, num_bytes: Scalar, seed: Scalar) -> Scalar:
    """9 to 16 bytes, of which `low` are the first eight and `high` the last eight."""
    low ^= (_SECRET[24] ^ _SECRET[32]) + seed
    high ^= (_SECRET[40] ^ _SECRET[48]) - seed
    return _avalanche(np.uint64(num_bytes) + _swapped(low) + high + _fold(low, high))


@compiled()
def _block(tokens: npt.NDArray[np.uint32], first: Scalar, size: Scalar, seed: Scalar) -> Scalar:
    if size <= 2:
        low = seed & _LOW
        low = (low & np.uint64(0xFF00FF)) << np.uint64(8) | (low >> np.uint64(8)) & np.uint64(0xFF00FF)
        low = (low & np.uint64(0xFFFF)) << np.uint64(16) | low >> np.uint64(16)
        key = (np.uint64(tokens[first + size - 1]) + (np.uint64(tokens[first]) << _32)) ^ (
            (_SECRET[8] ^ _SECRET[16]) - (seed ^ low << _32)
        )
        key ^= (key << np.uint64(49) | key >> np.uint64(15)) ^ (key << np.uint64(24) | key >> np.uint64(40))
        key *= _RRMXMX
        key = (key ^ ((key >> np.uint64(35)) + np.uint64(4 * size))) * _RRMXMX
        return key ^ (key >> np.uint64(28))
    last = first + size
    if size <= 4:
        return _two_words(_pair(tokens, first), _pair(tokens, last - 2), 4 * size, seed)
    mixed = np.uint64(4 * size) * _PRIME
    if size <= 32:
        for part in range((size - 1) // 8 + 1):
            mixed += _mix(tokens, first + 4 * part, 32 * part, seed)
            mixed += _mix(tokens, last - 4 * part - 4, 32 * part + 16, seed)
        return _avalanche(mixed)
    for part in range(8):
        mixed += _mix(tokens, first + 4 * part, 16 * part, seed)
    mixed = _avalanche(mixed)
    for part in range(8, size // 4):
        mixed += _mix(tokens, first + 4 * part, 16 * (part - 8) + 3, seed)
    return _avalanche(mixed + _mix(tokens, last - 4, 119, seed))


@compiled("void(uint32[::1], int64, uint64, uint64[::1])")
def hash_blocks(tokens: npt.NDArray[np.uint32], size: Scalar, seed: Scalar, hashes: Words) -> None:
    """Write the hash of each full block of `size` tokens without what is before it."""
    for number in range(hashes.shape[0]):
        hashes[number] = _block(tokens, number * size, size, seed)


@compiled("void(uint64[::1])")
def chain(hashes: Words) -> None:
    """Turn hashes of blocks into hashes of blocks with all that is before them."""
    for number in range(1, hashes.shape[0]):
        hashes[number] = _two_words(hashes[number - 1], hashes[number], 16, _CHAIN_SEED)
