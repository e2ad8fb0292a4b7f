"""The two hashes of a KV block.

*Reuse* is keyed by chained SHA-256, so that no tenant can make a block that collides with another's. *Events and
routing* use the public 64-bit form (XXH3-64, seed 1337) that vLLM's and Dynamo's consumers of KV events read; it is
equal across workers and restarts. Both chain over full blocks only.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

SEED = 1337
_MASK = (1 << 64) - 1
_PAIR = struct.Struct("<QQ")
_U32 = next(code for code in "IL" if array.array(code).itemsize == 4)


def token_bytes(tokens: Iterable[int]) -> bytes:
    packed = array.array(_U32, tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def tokens_of(packed: bytes) -> list[int]:
    """Return what `token_bytes` has packed."""
    tokens = array.array(_U32, packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def reuse_root(*parts: str) -> bytes:
    """Return the parent hash of first blocks: only chains with equal parts share blocks."""
    digest = hashlib.sha256(b"bireme kv 1")
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def reuse_hash(parent: bytes, tokens: bytes, media: bytes = b"") -> bytes:
    """Return the 32-byte key of a full block, from its tokens and all before them.

    `media`: see media_bytes.
    """
    return hashlib.sha256(parent + tokens + media).digest()


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens [first, last) of a prompt show this picture, from its beginning."""

    first: int
    last: int
    digest: bytes  # 32 bytes

    @property
    def event_hash(self) -> int:
        return int.from_bytes(self.digest[:8], "little")


def media_in(spans: Sequence[MediaSpan], first: int, last: int) -> list[MediaSpan]:
    """Return the spans of which a part lies in tokens [first, last)."""
    return [span for span in spans if span.first < last and span.last > first]


def media_bytes(spans: Sequence[MediaSpan], first: int) -> bytes:
    """Return the pictures' part of the hash of a block that begins at `first`: digest and start of each, 40 bytes."""
    return b"".join(span.digest + (span.first - first).to_bytes(8, "little", signed=True) for span in spans)


def event_seed(lora_name: str = "", cache_salt: str = "") -> int:
    """Return the seed for a LoRA and salt, so that equal tokens of different ones hash apart."""
    seed = SEED
    if lora_name:
        seed += xxhash.xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_salt:
        seed += xxhash.xxh3_64_intdigest(cache_salt.encode(), 1)
    return seed & _MASK


def salt_key(deployment_key: bytes) -> bytes:
    """Return the key of `salted_hash`: the same wherever the deployment's key is known."""
    return hashlib.blake2b(deployment_key, digest_size=32, person=b"bireme kv salted").digest()


def salted_hash(block_hash: int, key: bytes) -> int:
    """Return what stands for a block of a salted request outside of engines and routers.

    A keyed 64-bit BLAKE2b of the public hash. Without the key nobody can compute it for a prompt and a salt that he
    guesses, nor get from it to either.
    """
    digest = hashlib.blake2b(block_hash.to_bytes(8, "little"), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")


def local_hash(tokens: bytes, seed: int = SEED, media: Sequence[int] = ()) -> int:
    """Return the hash of a block's own tokens (little-endian u32) and media, without its prefix."""
    extra = b"".join(item.to_bytes(8, "little") for item in sorted(media))
    return xxhash.xxh3_64_intdigest(tokens + extra, seed)


def sequence_hash(parent: int | None, local: int) -> int:
    """Return the public hash of a block with its prefix; for a first block its local hash."""
    if parent is None:
        return local
    return xxhash.xxh3_64_intdigest(_PAIR.pack(parent, local), SEED)


def local_hashes(
    tokens: Sequence[int], block_size: int, seed: int = SEED, media: Sequence[MediaSpan] = ()
) -> list[int]:
    return [
        local_hash(
            token_bytes(tokens[at : at + block_size]),
            seed,
            [span.event_hash for span in media_in(media, at, at + block_size)],
        )
        for at in range(0, len(tokens) - block_size + 1, block_size)
    ]


def sequence_hashes(
    tokens: Sequence[int], block_size: int, seed: int = SEED, media: Sequence[MediaSpan] = ()
) -> list[int]:
    chain: list[int] = []
    for local in local_hashes(tokens, block_size, seed, media):
        chain.append(sequence_hash(chain[-1] if chain else None, local))
    return chain
