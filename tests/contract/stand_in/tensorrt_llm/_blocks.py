"""KV blocks as accounts: what is referenced, what could be reused, and the events about it."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from tensorrt_llm import _contract
from tensorrt_llm._pictures import Media

_UNIQUE = "unique_token"


class BlockAccounts:
    """Used from the executor's thread; events are read from others."""

    def __init__(self, kv: Any, num_blocks: int, window: int, num_ranks: int, vocab_size: int) -> None:
        self.num_blocks, self.tokens_per_block = num_blocks, kv.tokens_per_block
        self.num_used = 0
        self._has_reuse = kv.enable_block_reuse
        # Blocks that can be reused, oldest first -> memory level: 0 GPU, 1 host.
        self._known: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._num_on_host = num_blocks if kv.host_cache_size else 0
        self._window = window
        self._vocab_size = vocab_size
        self._hash_algo = _hash_algo(kv)
        self.events: deque[str] = deque(maxlen=kv.event_buffer_max_size if self._has_reuse else 0)
        self._next_ids = [0] * num_ranks
        self.reused = self.missed = self.allocated = 0
        for rank in range(num_ranks):
            self._event({"type": "created", "num_blocks_per_cache_level": [num_blocks, self._num_on_host]}, rank)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def fits(self, num_tokens: int) -> bool:
        return self.num_used + self.blocks_for(num_tokens) <= self.num_blocks

    def hold(self, num_tokens: int) -> int:
        count = self.blocks_for(num_tokens)
        self.num_used += count
        self.allocated += count
        return count

    def release(self, count: int) -> None:
        self.num_used -= count

    def match(self, tokens: Sequence[int], salt: str, lora_name: str, rank: int, media: Media) -> int:
        """Return how many prompt tokens are in reusable blocks; the last token is always computed."""
        if not self._has_reuse:
            return 0
        key = f"{salt}/{lora_name}"
        hashes = self._hashes(tokens, key, media)[: (len(tokens) - 1) // self.tokens_per_block]
        count = 0
        while count < len(hashes) and (rank, hashes[count]) in self._known:
            count += 1
        self.reused += count
        self.missed += len(hashes) - count
        return count * self.tokens_per_block

    def store(self, tokens: Sequence[int], salt: str, lora_name: str, rank: int, media: Media) -> None:
        """Offer the full blocks of a sequence, and the partial one at its end, as the real cache does."""
        if not self._has_reuse:
            return
        key = f"{salt}/{lora_name}"
        size, hashes = self.tokens_per_block, self._hashes(tokens, key, media)
        new = [at for at, block in enumerate(hashes) if (rank, block) not in self._known]
        for block in hashes:
            self._known[rank, block] = 0
            self._known.move_to_end((rank, block))
        if new:
            blocks = [self._block(hashes[at], tokens, at, salt, media) for at in new]
            parent = self._spell(hashes[new[0] - 1]) if new[0] else None
            if tail := tokens[len(hashes) * size :]:
                blocks.append(self._block(_hash(hashes[-1], tail, key), tokens, len(hashes), salt, media))
            body = {"type": "stored", "parent_hash": parent, "blocks": blocks}
            if _contract.FROM_1_3 and lora_name:
                body["lora_name"] = lora_name
            self._event(body, rank)
        self._evict()

    def _evict(self) -> None:
        """From the GPU to host memory, where there is any, and from there to nowhere."""
        on_gpu = [key for key, level in self._known.items() if level == 0]
        for key in on_gpu[: max(0, len(on_gpu) - self.num_blocks)]:
            rank, block = key
            if self._num_on_host:
                self._known[key] = 1
                diff = {"type": "event_diff", "new_value": 1, "old_value": 0}
                self._event({"type": "updated", "block_hash": self._spell(block), "cache_level": diff}, rank)
            else:
                self._remove(key)
        on_host = [key for key, level in self._known.items() if level == 1]
        for key in on_host[: max(0, len(on_host) - self._num_on_host)]:
            self._remove(key)

    def _remove(self, key: tuple[int, int]) -> None:
        del self._known[key]
        self._event({"type": "removed", "block_hashes": [self._spell(key[1])]}, key[0])

    def _block(self, block_hash: int, tokens: Sequence[int], number: int, salt: str, media: Media) -> dict[str, Any]:
        first = number * self.tokens_per_block
        last = min(first + self.tokens_per_block, len(tokens))
        told = [self._token(tokens[at], at, media) for at in range(first, last)]
        unique = [{"type": _UNIQUE, "token_id": token, "token_extra_id": 0} for token in told]
        block = {
            "type": "stored_block",
            "block_hash": self._spell(block_hash),
            "tokens": unique,
            "cache_level": 0,
            "priority": 35,
            "mm_keys": [] if _contract.FROM_1_4 else _media_keys(media, first, last),
        }
        if _contract.FROM_1_3 and salt:
            block["cache_salt"] = salt
        return block

    def _token(self, token: int, at: int, media: Media) -> int | str:
        """KV cache manager V2 has a picture's digest in its first place, and numbers beyond the vocabulary after it."""
        if not _contract.FROM_1_4 or media.hashes is None:
            return token
        for first, length, hashed in zip(media.positions, media.lengths, media.hashes, strict=True):
            if first <= at < first + length:
                return _digest(hashed) if at == first else self._vocab_size + at - first
        return token

    def _event(self, body: dict[str, Any], rank: int) -> None:
        event = {"event_id": self._next_ids[rank], "data": body, "window_size": self._window}
        if len(self._next_ids) > 1:
            event["attention_dp_rank"] = rank
        if _contract.FROM_1_4:
            event |= {"layer_group_id": 0, "hash_algo": self._hash_algo}
        self.events.append(json.dumps(event))
        self._next_ids[rank] += 1

    def _hashes(self, tokens: Sequence[int], salt: str, media: Media) -> list[int]:
        size, chain = self.tokens_per_block, []
        for at in range(0, len(tokens) - size + 1, size):
            shown = f"{salt}{_media_keys(media, at, at + size) or ''}"
            chain.append(_hash(chain[-1] if chain else 0, tokens[at : at + size], shown))
        return chain

    def _spell(self, block_hash: int) -> int | str:
        """64 bits as a number, or the digits of a SHA-256."""
        return f"{block_hash:064x}" if self._hash_algo == "v2_sha256" else block_hash


def _hash_algo(kv: Any) -> str:
    if not _contract.FROM_1_4:
        return "v1_block_key"
    return "v2_sha256" if kv.kv_cache_event_hash_algo == "auto" else str(kv.kv_cache_event_hash_algo)


def _hash(parent: int, tokens: Sequence[int], salt: str) -> int:
    data = f"{parent}:{','.join(map(str, tokens))}:{salt}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _media_keys(media: Media, first: int, last: int) -> list[dict[str, Any]]:
    """Name the pictures of which a part lies in tokens [first, last)."""
    return [
        {"type": "mm_key", "hash": _digest(hashed), "start_offset": max(0, first - begin)}
        for begin, length, hashed in zip(media.positions, media.lengths, media.hashes or (), strict=False)
        if begin < last and begin + length > first
    ]


def _digest(numbers: Sequence[int]) -> str:
    return b"".join(number.to_bytes(4, "big", signed=True) for number in numbers).hex()
