"""A model's tokens as the bytes that they stand for: what grammars are compiled against.

There are three views of it. In `plain` special tokens stand for nothing, so that no grammar can produce one:
a detokeniser drops their text, and a quotation of `<|im_end|>` must be spelled out. `json` also lacks tokens
with control characters, which JSON text must not hold and which xgrammar lets into strings of a limited
length. In `marked` special tokens stand for their text, because structural tags are made of such markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

View = Literal["plain", "json", "marked"]

MAX_BLANK_BYTES = 2
_CONTROL = frozenset(range(32)) - {10, 13}  # line breaks are layout, and xgrammar keeps them out of strings


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """Bytes by token id, special tokens with their text."""

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    vocab_size: int  # of the model's head; it may be larger than the table
    blank_ids: frozenset[int] = frozenset()  # nothing but a little white space

    def view(self, name: View, stop_ids: Iterable[int]) -> list[bytes]:
        """Return the table with the hidden tokens empty."""
        hidden = set(stop_ids) if name == "marked" else {*self.special_ids, *stop_ids}
        if name == "json":
            hidden |= {at for at, token in enumerate(self.tokens) if any(byte in _CONTROL for byte in token)}
        shown = [b"" if at in hidden else token for at, token in enumerate(self.tokens[: self.vocab_size])]
        return shown + [b""] * (self.vocab_size - len(shown))

    def text(self, token: int) -> bytes:
        return self.tokens[token] if 0 <= token < len(self.tokens) else b""


def make_table(
    texts: Sequence[str | None], parts: dict[int, bytes], special_ids: Iterable[int], vocab_size: int
) -> TokenTable:
    """Build it from text.vocabulary's columns: complete texts, and bytes where a token holds parts of characters."""
    tokens = tuple(parts[at] if text is None else text.encode() for at, text in enumerate(texts))
    blank_ids = frozenset(
        at for at, token in enumerate(tokens[:vocab_size]) if token.isspace() and len(token) <= MAX_BLANK_BYTES
    )
    return TokenTable(tokens, frozenset(special_ids), vocab_size, blank_ids)
