"""TensorRT-LLM's KV events to ours: public hashes, widest window, full blocks only. Pure.

Theirs name blocks by a hash of their own (unsigned 64 bits, which may arrive signed, or hexadecimal text); ours by the
public one, chained from the tokens, so that it is equal across workers and engines. Event ids count up by one a rank. A
gap, or an event that can't be read, means lost events: what readers know of this rank is invalid then.

A picture's places come in three forms, each read as placeholders and its hash, as a router hashes them. These are the
placeholder itself or a token beyond the vocabulary, with `mm_keys`; and by KV cache manager V2 its digest in the first
place and tokens beyond the vocabulary in the others. Of a model of text alone such a block has no name. Releases whose
events do not name their owners show a salted or an adapter's request like any other: `expect_owned` says which prompts
these are, so that their blocks are not published under hashes of plain prompts.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bireme.kv.blocks import hashing
from bireme.kv.blocks.events import BlocksCleared, BlocksMoved, BlocksRemoved, BlocksStored, KvEvent, StoredBlock

logger = logging.getLogger("bireme.engines.trtllm")
_MASK = (1 << 64) - 1
_Link = tuple[tuple[int, int], StoredBlock]  # (rank, their hash), the block under ours
_DIGEST_DIGITS = 64
_MAX_OWNED = 65_536  # expected chains that have not come; the oldest are forgotten


@dataclass(frozen=True, slots=True)
class PicturePlaces:
    """How the places of pictures are read."""

    placeholder: int
    vocab_size: int

    def read(
        self, tokens: Sequence[int | str], inside: int | None
    ) -> tuple[tuple[int | str, ...], tuple[int, ...], int | None]:
        """Return a block's tokens, the pictures that digests name in it, and the one in which it ends."""
        found: list[int | str] = []
        shown: list[int] = []
        for token in tokens:
            if isinstance(token, str) and len(token) == _DIGEST_DIGITS:
                inside = int(token[:16], 16)
            elif isinstance(token, str) or token < self.vocab_size:
                found.append(token)
                inside = None
                continue
            found.append(self.placeholder)
            if inside is not None and inside not in shown:
                shown.append(inside)
        return tuple(found), tuple(shown), inside


class KvEventReader:
    """`read` from one thread, `expect_owned` from one."""

    def __init__(self, tokens_per_block: int, *, has_owners: bool = True, places: PicturePlaces | None = None) -> None:
        """`places`: None: the model takes no pictures."""
        self._size = tokens_per_block
        self._has_owners = has_owners
        self._places = places
        self._inside: dict[tuple[int, int], int] = {}  # (rank, their hash) -> the picture in which the block ends
        # The plain hash of a prompt's last full block -> how many owned chains through it are still to come.
        self._owned: OrderedDict[int, int] = OrderedDict()
        self._num_unread = 0
        self._window: int | None = None  # the widest; None: no event has told it yet
        self._is_settled = False  # the first stored or removed ends the announcements of windows
        self._last_ids: dict[int, int] = {}  # by rank
        self._public: dict[tuple[int, int], int] = {}  # (rank, their hash) -> ours
        self._partial: set[tuple[int, int]] = set()
        self._next_id = 0
        self.num_gaps = 0  # events lost

    def expect_owned(self, prompt: Sequence[int], media: Sequence[hashing.MediaSpan] = ()) -> None:
        """Before the request is submitted: the next chain of this prompt has a salt or an adapter."""
        if self._has_owners or len(prompt) < self._size:
            return
        last = hashing.sequence_hashes(prompt, self._size, media=media)[-1]
        self._owned[last] = self._owned.get(last, 0) + 1
        if len(self._owned) > _MAX_OWNED:
            self._owned.popitem(last=False)

    def read(self, event: Mapping[str, Any]) -> list[KvEvent]:
        """Often none. An event that can't be read voids its rank."""
        rank = 0
        try:
            rank = int(event.get("attention_dp_rank") or 0)
            return self._read(event, rank)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._num_unread += 1
            if str(self._num_unread).strip("0") == "1":  # 1, 10, 100, ...
                logger.error("kv_event_unread count=%d error=%r event=%.300s", self._num_unread, error, event)
            return self._void(rank)

    def _read(self, event: Mapping[str, Any], rank: int) -> list[KvEvent]:
        found: list[KvEvent] = self._check_id(event.get("event_id"), rank)
        data, window = event.get("data") or {}, event.get("window_size")
        kind = data.get("type")
        if kind == "created":
            self._announce(window)
        elif kind in ("stored", "removed", "updated"):
            self._is_settled = self._is_settled or kind != "updated"
            if window is None or self._window is None or window == self._window:
                read = {"stored": self._stored, "removed": self._removed, "updated": self._updated}[kind]
                found += read(data, rank)
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
        return self._void(rank)

    def _void(self, rank: int) -> list[KvEvent]:
        self._public = {key: value for key, value in self._public.items() if key[0] != rank}
        self._partial = {key for key in self._partial if key[0] != rank}
        self._inside = {key: value for key, value in self._inside.items() if key[0] != rank}
        return [BlocksCleared(self._number(), rank)]

    def _announce(self, window: Any) -> None:
        """Attention windows of different layers have events of their own; only the widest shows what is reusable."""
        if isinstance(window, int) and not self._is_settled:
            self._window = max(self._window or 0, window)

    def _stored(self, data: Mapping[str, Any], rank: int) -> list[KvEvent]:
        blocks: Sequence[Mapping[str, Any]] = data.get("blocks") or ()
        if (owner := self._owner(data, blocks)) is None:
            return []
        public_parent, inside = None, None
        if (parent := data.get("parent_hash")) is not None:
            key = (rank, unsigned(parent))
            public_parent, inside = self._public.get(key), self._inside.get(key)
            if public_parent is None:
                return []  # its beginning was lost, or lies in a partial block: it has no name
        chain = self._chain(blocks, rank, public_parent, hashing.event_seed(*owner), inside)
        if not any(owner):
            chain = self._without_owned(chain, is_beginning=parent is None)
        if not chain:
            return []
        self._public |= {key: block.block_hash for key, block in chain}
        stored = tuple(block for _, block in chain)
        return [BlocksStored(self._number(), public_parent, stored, *owner, rank)]

    def _owner(self, data: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
        """Return the adapter and the salt of blocks; None, with a line in the log: they can't be published."""
        salts = {str(block.get("cache_salt") or data.get("cache_salt") or "") for block in blocks}
        if len(salts) > 1:
            logger.error("kv_event_dropped reason=several salts")
        elif any(len(block.get("tokens") or ()) > self._size for block in blocks):
            logger.error("kv_event_dropped reason=block too long")
        else:
            return str(data.get("lora_name") or ""), next(iter(salts), "")
        return None

    def _chain(
        self, blocks: Sequence[Mapping[str, Any]], rank: int, parent: int | None, seed: int, inside: int | None
    ) -> list[_Link]:
        found: list[_Link] = []
        for block in blocks:
            if block.get("block_hash") is None:
                continue
            key = (rank, unsigned(block["block_hash"]))
            tokens, media = _tokens(block), _media(block)
            if self._places is not None:
                tokens, shown, inside = self._places.read(tokens, inside)
                media = media or shown
                if inside is not None:
                    self._inside[key] = inside
            if len(tokens) < self._size or any(isinstance(token, str) for token in tokens):
                self._partial.add(key)
                break
            parent = hashing.sequence_hash(parent, hashing.local_hash(hashing.token_bytes(tokens), seed, media))
            found.append((key, StoredBlock(parent, tokens, media)))
        return found

    def _without_owned(self, chain: list[_Link], *, is_beginning: bool) -> list[_Link]:
        """Leave out an expected chain: the whole of it, or what it adds to a plain one."""
        for at, (_, block) in enumerate(chain):
            if count := self._owned.pop(block.block_hash, 0):
                if count > 1:
                    self._owned[block.block_hash] = count - 1
                return [] if is_beginning else chain[:at]
        return chain

    def _removed(self, data: Mapping[str, Any], rank: int) -> list[KvEvent]:
        found = []
        for value in data.get("block_hashes") or ():
            key = (rank, unsigned(value))
            self._inside.pop(key, None)
            if key in self._partial:
                self._partial.discard(key)
            elif (public := self._public.pop(key, None)) is not None:
                found.append(public)
        return [BlocksRemoved(self._number(), tuple(found), rank)] if found else []

    def _updated(self, data: Mapping[str, Any], rank: int) -> list[KvEvent]:
        """A block that goes to host memory, or comes back; other updates (its priority) change nothing here."""
        change: Mapping[str, Any] | None = data.get("cache_level")
        public = self._public.get((rank, unsigned(data["block_hash"]))) if change else None
        return [BlocksMoved(self._number(), (public,), int(change["new_value"]), rank)] if change and public else []

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _tokens(block: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(token["token_id"] for token in block.get("tokens") or ())


def _media(block: Mapping[str, Any]) -> tuple[int, ...]:
    """What has another type, or no hash, names none."""
    keys = [item for item in block.get("mm_keys") or () if item.get("type", "mm_key") == "mm_key" and item.get("hash")]
    return tuple(int(str(item["hash"])[:16], 16) for item in keys)


def unsigned(value: int | str) -> int:
    """Theirs may be signed, unsigned, or hexadecimal text."""
    number = int(value, 16) if isinstance(value, str) else int(value)
    return number & _MASK
