"""XXH3-64 of the blocks of a prompt: what hashing.py computes block by block, for all of them in one compiled call.

The algorithm and its secret are xxHash's (github.com/Cyan4973/xxHash, xxhash.h, XXH3_64bits_withSeed), for inputs of 4
to 240 bytes; longer ones take another path there, which is left to the library. And the keyed hashes of salted blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bireme.kv.kernels.compiling import Scalar, Words, compiled

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


# BLAKE2b (RFC 7693), for keyed hashes of one block's public hash: hashing.salted_hash.
_IV = np.array(
    [
        0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
        0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
    ],
    np.uint64,
)  # fmt: skip
_SIGMA = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    ]
)
_BLAKE2B_PARAMETERS = np.uint64(0x01010000 | 32 << 8 | 8)  # no tree, a key of 32 bytes, 8 bytes of hash


@compiled()
def _mixed(a: Scalar, b: Scalar, c: Scalar, d: Scalar, x: Scalar, y: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    a = a + b + x
    d = (d ^ a) >> np.uint64(32) | (d ^ a) << np.uint64(32)
    c = c + d
    b = (b ^ c) >> np.uint64(24) | (b ^ c) << np.uint64(40)
    a = a + b + y
    d = (d ^ a) >> np.uint64(16) | (d ^ a) << np.uint64(48)
    c = c + d
    b = (b ^ c) >> np.uint64(63) | (b ^ c) << np.uint64(1)
    return a, b, c, d


@compiled()
def _compress(state: Words, message: Words, num_bytes: Scalar, last: Scalar) -> None:
    """Take 16 words of message into the state; `last`: all bits set with the last ones, else none."""
    v0, v1, v2, v3, v4, v5, v6, v7 = (
        state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7],
    )  # fmt: skip
    v8, v9, v10, v11, v12, v13, v14, v15 = (
        _IV[0], _IV[1], _IV[2], _IV[3], _IV[4] ^ np.uint64(num_bytes), _IV[5], _IV[6] ^ last, _IV[7],
    )  # fmt: skip
    for turn in range(12):
        order = _SIGMA[turn]
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, message[order[0]], message[order[1]])
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, message[order[2]], message[order[3]])
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, message[order[4]], message[order[5]])
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, message[order[6]], message[order[7]])
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, message[order[8]], message[order[9]])
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, message[order[10]], message[order[11]])
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, message[order[12]], message[order[13]])
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, message[order[14]], message[order[15]])
    state[0], state[1], state[2], state[3] = (
        state[0] ^ v0 ^ v8, state[1] ^ v1 ^ v9, state[2] ^ v2 ^ v10, state[3] ^ v3 ^ v11,
    )  # fmt: skip
    state[4], state[5], state[6], state[7] = (
        state[4] ^ v4 ^ v12, state[5] ^ v5 ^ v13, state[6] ^ v6 ^ v14, state[7] ^ v7 ^ v15,
    )  # fmt: skip


@compiled("void(uint64[::1], uint64[::1])")
def salt(key: Words, hashes: Words) -> None:
    """Turn public hashes into what stands for them outside, hashing.salted_hash; key: its 32 bytes as 4 words."""
    begun, state, message = _IV.copy(), _IV.copy(), np.zeros(16, np.uint64)
    begun[0] ^= _BLAKE2B_PARAMETERS
    message[:4] = key
    _compress(begun, message, 128, np.uint64(0))
    message[:4] = np.uint64(0)
    for number in range(hashes.shape[0]):
        state[:] = begun
        message[0] = hashes[number]
        _compress(state, message, 136, ~np.uint64(0))
        hashes[number] = state[0]
