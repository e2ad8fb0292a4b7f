"""The noise of draws: a number for each token id that depends on (seed, position, token id) alone.

A stream's n-th token has the largest scaled logit + Gumbel noise (`filters.py`), in any batch, engine and device. The
noise is -log(E) of an exponential number E. Most ids never need it: 256 ids in a row are a block, and

    least(block)  = exponential(word(2^31 | block)) / 256           the smallest E of the block's ids
    member(block) = word(3 * 2^30 | block) >> 24                    whose E that is, by its place in the block
    E(id)         = least, of the member; of others least + exponential(word(id))

are independent exponential numbers, since that distribution has no memory. A block whose largest logit - log(least) is
below a score that was found elsewhere holds no winner.

    word(n)        = 32 bits: `mix` of n and the draw's key, the first two words of Philox4x32-10 at counter (position)
                     under the key (seed)
    exponential(w) = -log(1 - v) for v = (w + 1/2) / 2^32, in float32; of v below 2^-12, v + v * v / 2

Philox: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), ten rounds as there and
in CUDA. The GPU's kernel (engines/torch/kernels/draw.py) computes the same numbers. Suffix: B blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
Key = tuple[int, int]

BLOCK = 256  # token ids
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LEAST, _MEMBER = np.uint32(1 << 31), np.uint32(3 << 30)  # what a word is of, beside the block's number
_BELOW_ONE = np.float32(1 - 2.0**-24)
_SMALL = np.float32(2.0**-12)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Return four 32-bit words; all arguments are Python integers, or uint64 arrays of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def draw_key(seed: int, position: int) -> Key:
    first, second, _, _ = philox((position & _MASK, position >> 32, 0, 0), (seed & _MASK, seed >> 32))
    return first, second


def mix(numbers: Words, key: Key) -> Words:
    words = numbers + np.uint32(key[0])
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x7FEB352D)
    words ^= words >> np.uint32(15)
    words ^= np.uint32(key[1])
    words *= np.uint32(0x846CA68B)
    words ^= words >> np.uint32(16)
    return words


def exponentials(words: Words) -> Floats:
    """Return an exponential number for each word; 0 of none."""
    shares = words.astype(np.float32)
    shares += np.float32(0.5)
    shares *= np.float32(2.0**-32)
    np.minimum(shares, _BELOW_ONE, out=shares)
    return np.where(shares < _SMALL, shares + shares * shares * np.float32(0.5), -np.log(np.float32(1) - shares))


def least_of_blocks(key: Key, blocks_B: Words) -> Floats:
    return exponentials(mix(blocks_B | _LEAST, key)) / np.float32(BLOCK)


def noise_of_ids(key: Key, ids: Words, least: Floats) -> Floats:
    """Return the Gumbel noise of each id; `least` is that of its block."""
    e = exponentials(mix(ids, key))
    blocks = ids // np.uint32(BLOCK)
    e[mix(blocks | _MEMBER, key) >> 24 == ids % np.uint32(BLOCK)] = 0
    e += least
    np.log(e, out=e)
    return np.negative(e, out=e)
