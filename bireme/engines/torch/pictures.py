"""The pictures of a sequence: where their tokens stand, their embeddings, their rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from bireme.kv.hashing import MediaSpan
from bireme.kv.transfer.base import Fetch
from bireme.multimodal.mrope import Positions, rope_positions
from bireme.multimodal.wire import OpenedItem


@dataclass(slots=True, eq=False)
class SequencePictures:
    """One sequence's."""

    items: tuple[OpenedItem, ...]  # in the order of positions
    rope: Positions | None = None  # (3, prompt tokens); None: positions have one dimension
    rows: list[Tensor | None] = field(default_factory=list)  # (num_tokens, hidden) each, in the model's dtype
    fetches: list[Fetch] = field(default_factory=list)
    num_missing: int = 0
    held_bytes: int = 0

    @property
    def spans(self) -> tuple[MediaSpan, ...]:
        return tuple(
            MediaSpan(item.position, item.position + item.num_tokens, bytes.fromhex(item.hash)) for item in self.items
        )

    @property
    def is_to_be_computed(self) -> bool:
        return any(item.handle is not None for item in self.items)

    def rows_in(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (token, rows from there) of all embeddings for tokens [first, last)."""
        for item, rows in zip(self.items, self.rows, strict=False):
            begin, end = max(first, item.position), min(last, item.position + item.num_tokens)
            if begin < end:
                assert rows is not None, "a picture's embeddings have been let go of"
                yield begin, rows[begin - item.position : end - item.position]

    def positions(self, first: int, last: int) -> Positions:
        """Return the rotary positions of tokens [first, last), generated ones too: (3, last - first)."""
        assert self.rope is not None
        known = self.rope[:, first : min(last, self.rope.shape[1])]
        after = np.arange(max(first, self.rope.shape[1]), last) + self.delta
        return np.concatenate([known, np.broadcast_to(after, (3, len(after)))], axis=1)

    @property
    def delta(self) -> int:
        """Return how far positions run behind tokens after the prompt; zero or less."""
        assert self.rope is not None
        return int(self.rope[:, -1].max()) + 1 - self.rope.shape[1]


def pictures_of(items: tuple[OpenedItem, ...], num_prompt: int, merge_size: int) -> SequencePictures | None:
    """Return None for a request without pictures."""
    if not items:
        return None
    rope = rope_positions(num_prompt, items, merge_size) if merge_size else None
    return SequencePictures(items, rope, [None] * len(items))
