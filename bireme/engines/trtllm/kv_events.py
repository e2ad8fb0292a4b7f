"""TensorRT-LLM's KV events to ours: public hashes, widest window, full blocks only. Pure.

Theirs name blocks by a hash of their own (unsigned 64 bits, which may arrive signed, or hexadecimal text);
ours by the public one, chained from the tokens, so that it is equal across workers and engines. Event ids
count up by one a rank; a gap means lost events: what readers know of this worker is void then.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bireme.kv import hashing
from bireme.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, StoredBlock

logger = logging.getLogger("bireme.engines.trtllm")
_MASK = (1 << 64) - 1


class KvEventReader:
    """Used from one thread."""

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        self._window: int | None = None  # the widest; None: no event has told it yet
        self._is_settled = False  # the first stored or removed ends the announcements of windows
        self._last_ids: dict[int, int] = {}  # by rank
        self._public: dict[tuple[int, int], int] = {}  # (rank, their hash) -> ours
        self._partial: set[tuple[int, int]] = set()
        self._next_id = 0
        self.num_gaps = 0  # events lost

    def read(self, event: Mapping[str, Any]) -> list[KvEvent]:
        """Return what an event means to readers; often nothing."""
        rank = int(event.get("attention_dp_rank") or 0)
        found: list[KvEvent] = self._check_id(event.get("event_id"), rank)
        data, window = event.get("data") or {}, event.get("window_size")
        kind = data.get("type")
        if kind == "created":
            self._announce(window)
        elif kind in ("stored", "removed"):
            self._is_settled = True
            if window is None or self._window is None or window == self._window:
                found += self._stored(data, rank) if kind == "stored" else self._removed(data, rank)
        return found

    def _check_id(self, event_id: Any, rank: int) -> list[KvEvent]:
        if not isinstance(event_id, int):
            return []
        last = self._last_ids.get(rank)
        self._last_ids[rank] = event_id
        if last is None or event_id == last + 1:
            return []
        logger.warning("kv_event_gap rank=%d expected=%d got=%d", rank, last + 1, event_id)
        self.num_gaps += max(1, event_id - last - 1)
        self._public = {key: value for key, value in self._public.items() if key[0] != rank}
        self._partial = {key for key in self._partial if key[0] != rank}
        return [BlocksCleared(self._number(), rank)]

    def _announce(self, window: Any) -> None:
        """Attention windows of different layers have events of their own; only the widest tells what is reusable."""
        if isinstance(window, int) and not self._is_settled:
            self._window = max(self._window or 0, window)

    def _stored(self, data: Mapping[str, Any], rank: int) -> list[KvEvent]:
        blocks: Sequence[Mapping[str, Any]] = data.get("blocks") or ()
        salts = {str(block.get("cache_salt") or data.get("cache_salt") or "") for block in blocks}
        if len(salts) > 1 or any(len(block.get("tokens") or ()) > self._size for block in blocks):
            logger.error("kv_event_dropped reason=%s", "several salts" if len(salts) > 1 else "block too long")
            return []
        lora_name, salt = str(data.get("lora_name") or ""), next(iter(salts), "")
        parent = data.get("parent_hash")
        public_parent = None
        if parent is not None:
            public_parent = self._public.get((rank, unsigned(parent)))
            if public_parent is None:
                return []  # its beginning was lost, or lies in a partial block: it can't be named
        found = self._chain(blocks, rank, public_parent, hashing.event_seed(lora_name, salt))
        if not found:
            return []
        return [BlocksStored(self._number(), 0, public_parent, tuple(found), lora_name, salt, rank)]

    def _chain(
        self, blocks: Sequence[Mapping[str, Any]], rank: int, parent: int | None, seed: int
    ) -> list[StoredBlock]:
        found: list[StoredBlock] = []
        for block in blocks:
            if block.get("block_hash") is None:
                continue
            key = (rank, unsigned(block["block_hash"]))
            tokens = tuple(int(token["token_id"]) for token in block.get("tokens") or ())
            if len(tokens) < self._size:
                self._partial.add(key)
                break
            media = [int(str(item["hash"])[:16], 16) for item in block.get("mm_keys") or ()]
            parent = hashing.sequence_hash(parent, hashing.local_hash(hashing.token_bytes(tokens), seed, media))
            self._public[key] = parent
            found.append(StoredBlock(parent, tokens))
        return found

    def _removed(self, data: Mapping[str, Any], rank: int) -> list[KvEvent]:
        found = []
        for value in data.get("block_hashes") or ():
            key = (rank, unsigned(value))
            if key in self._partial:
                self._partial.discard(key)
            elif (public := self._public.pop(key, None)) is not None:
                found.append(public)
        return [BlocksRemoved(self._number(), 0, tuple(found), rank)] if found else []

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def unsigned(value: int | str) -> int:
    """Return a hash as an unsigned 64-bit number: theirs may be signed, unsigned, or hexadecimal text."""
    number = int(value, 16) if isinstance(value, str) else int(value)
    return number & _MASK
