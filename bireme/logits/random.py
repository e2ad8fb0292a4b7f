"""Random numbers that depend on (seed, position) alone: Philox4x32-10.

A stream's n-th token uses the uniform number at counter n under the key `seed`, in any batch and on any engine; so a
migrated or preempted stream goes on exactly. Philox is the counter-based generator of Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3" (SC 2011), ten rounds as there and in CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MAX_SCALAR_DRAWS = 32  # above it one numpy pass is quicker than Python integers


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Return four 32-bit words; all arguments are Python integers, or uint64 arrays of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each pair, 53 bits each."""
    if len(seeds) <= _MAX_SCALAR_DRAWS:
        return np.array([_uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)])
    key = np.array(seeds, dtype=np.uint64)
    at = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(at)
    high, low, _, _ = philox((at & _MASK, at >> 32, zero, zero), (key & _MASK, key >> 32))
    words: npt.NDArray[np.uint64] = ((high << 32) | low) >> 11
    return words * 2.0**-53


def _uniform(seed: int, position: int) -> float:
    high, low, _, _ = philox((position & _MASK, position >> 32, 0, 0), (seed & _MASK, seed >> 32))
    return float((((high << 32) | low) >> 11) * 2.0**-53)
