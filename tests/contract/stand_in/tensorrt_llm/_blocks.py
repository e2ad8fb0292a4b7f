"""KV blocks as accounts: what is referenced, what could be reused, and the events about it."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

_UNIQUE = "unique_token"


class BlockAccounts:
    """Used from the executor's thread; events are read from others."""

    def __init__(self, num_blocks: int, tokens_per_block: int, has_reuse: bool, event_buffer: int, window: int) -> None:
        self.num_blocks, self.tokens_per_block = num_blocks, tokens_per_block
        self.num_used = 0
        self._has_reuse = has_reuse
        self._known: OrderedDict[int, None] = OrderedDict()  # hashes that can be reused, oldest first
        self._window = window
        self.events: deque[str] = deque(maxlen=event_buffer) if event_buffer and has_reuse else deque(maxlen=0)
        self._next_id = 0
        self.reused = self.missed = self.allocated = 0
        self._event({"type": "created", "num_blocks_per_cache_level": [num_blocks, 0]})

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

    def match(self, tokens: Sequence[int], salt: str) -> int:
        """Return how many prompt tokens are in reusable blocks; the last token is always computed."""
        if not self._has_reuse:
            return 0
        hashes = self._hashes(tokens, salt)[: (len(tokens) - 1) // self.tokens_per_block]
        count = 0
        while count < len(hashes) and hashes[count] in self._known:
            count += 1
        self.reused += count
        self.missed += len(hashes) - count
        return count * self.tokens_per_block

    def store(self, tokens: Sequence[int], salt: str) -> None:
        """Offer the full blocks of a sequence, and the partial one at its end, as the real cache does."""
        if not self._has_reuse:
            return
        size, hashes = self.tokens_per_block, self._hashes(tokens, salt)
        new = [at for at, block in enumerate(hashes) if block not in self._known]
        for block in hashes:
            self._known[block] = None
            self._known.move_to_end(block)
        if new:
            blocks = [self._block(hashes[at], tokens[at * size : (at + 1) * size]) for at in new]
            parent = hashes[new[0] - 1] if new[0] else None
            if tail := tokens[len(hashes) * size :]:
                blocks.append(self._block(_hash(hashes[-1], tail, salt), tail))
            self._event({"type": "stored", "parent_hash": parent, "blocks": blocks})
        self._evict()

    def _evict(self) -> None:
        while len(self._known) > self.num_blocks:
            block, _ = self._known.popitem(last=False)
            self._event({"type": "removed", "block_hashes": [block]})

    def _block(self, block_hash: int, tokens: Sequence[int]) -> dict[str, Any]:
        unique = [{"type": _UNIQUE, "token_id": token, "token_extra_id": 0} for token in tokens]
        return {
            "type": "stored_block",
            "block_hash": block_hash,
            "tokens": unique,
            "cache_level": 0,
            "priority": 35,
            "mm_keys": [],
        }

    def _event(self, body: dict[str, Any]) -> None:
        self.events.append(json.dumps({"event_id": self._next_id, "data": body, "window_size": self._window}))
        self._next_id += 1

    def _hashes(self, tokens: Sequence[int], salt: str) -> list[int]:
        size, chain = self.tokens_per_block, []
        for at in range(0, len(tokens) - size + 1, size):
            chain.append(_hash(chain[-1] if chain else 0, tokens[at : at + size], salt))
        return chain


def _hash(parent: int, tokens: Sequence[int], salt: str) -> int:
    data = f"{parent}:{','.join(map(str, tokens))}:{salt}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
