"""The public hashes of whole prompts, quickly: what a router looks up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from bireme.kv.blocks import hashing
from bireme.kv.blocks.hashing import SEED, MediaSpan


class PromptHasher:
    """Callable from any thread. Making the first loads, or compiles, the code: see KvIndex."""

    def __init__(self, tokens_per_block: int) -> None:
        from bireme.kv.kernels import compiling, hash_kernels

        self.tokens_per_block = tokens_per_block
        self._kernels, self._is_compiled = hash_kernels, compiling.IS_COMPILED

    def __call__(
        self,
        prompt: npt.NDArray[np.int32],
        seed: int = SEED,
        media: Sequence[MediaSpan] = (),
        salt_key: bytes | None = None,
    ) -> npt.NDArray[np.uint64]:
        """Return the hash of each full block of the prompt with all before it; `seed` as of hashing.event_seed.

        `salt_key`: as of hashing.salted_hash, which then stands for each.
        """
        size = self.tokens_per_block
        tokens = np.ascontiguousarray(prompt, np.int32).view(np.uint32)
        hashes = np.zeros(len(tokens) // size, np.uint64)
        if size <= self._kernels.MAX_TOKENS:
            self._kernels.hash_blocks(
                tokens if tokens.flags.writeable else tokens.copy(), size, np.uint64(seed), hashes
            )
        else:
            raw = memoryview(tokens.tobytes())
            for number in range(len(hashes)):
                hashes[number] = xxhash.xxh3_64_intdigest(raw[4 * size * number : 4 * size * (number + 1)], seed)
        for number in _blocks_of(media, size, len(hashes)):
            first = number * size
            shown = [span.event_hash for span in hashing.media_in(media, first, first + size)]
            hashes[number] = hashing.local_hash(tokens[first : first + size].tobytes(), seed, shown)
        self._kernels.chain(hashes)
        if salt_key is not None:
            self._salt(hashes, salt_key)
        return hashes

    def _salt(self, hashes: npt.NDArray[np.uint64], key: bytes) -> None:
        if self._is_compiled:
            self._kernels.salt(np.frombuffer(key, "<u8").astype(np.uint64), hashes)
        else:
            hashes[:] = [hashing.salted_hash(item, key) for item in hashes.tolist()]


def _blocks_of(media: Sequence[MediaSpan], size: int, num_blocks: int) -> list[int]:
    """Return the full blocks in which a picture shows."""
    touched = {number for span in media for number in range(span.first // size, -(-span.last // size))}
    return sorted(number for number in touched if number < num_blocks)
