"""A model's tokens as bytes: what grammars are compiled against.

In the view `plain` special tokens have no text, since a detokenizer drops it: a quoted `<|im_end|>` is spelled out.
`json` also lacks tokens with control characters, which xgrammar allows in strings of a limited length. In `marked`
special tokens have their text: structural tags consist of them.

xgrammar takes surrogates (U+D800 to U+DFFF, bytes ED A0 to ED BF) for characters. UTF-8 has none (RFC 3629, section 3):
each would become three replacement characters. Hence the half tokens below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

View = Literal["plain", "json", "marked"]

MAX_BLANK_BYTES = 2
_CONTROL = frozenset(range(32)) - {10, 13}  # line breaks are layout, and xgrammar keeps them out of strings
_LEAD, _SECOND = b"\xed", {bytes([byte]) for byte in range(0xA0, 0xC0)}  # a surrogate's first two bytes
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """Bytes by token id, special tokens with their text."""

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    vocab_size: int  # of the model's head; it may be larger than the table
    blank_ids: frozenset[int] = frozenset()  # nothing but a little white space
    half_ids: frozenset[int] = frozenset()  # their last byte may begin a surrogate
    other_half_mask: npt.NDArray[np.int32] | None = None  # bits of those that could complete it; None: there are none

    def view(self, name: View, stop_ids: Iterable[int]) -> list[bytes]:
        hidden = set(stop_ids) if name == "marked" else {*self.special_ids, *stop_ids}
        hidden.update(_where(self.tokens, _SURROGATE.search))
        if name == "json":
            hidden.update(_where(self.tokens, lambda token: not _CONTROL.isdisjoint(token)))
        shown = [b"" if at in hidden else token for at, token in enumerate(self.tokens[: self.vocab_size])]
        return shown + [b""] * (self.vocab_size - len(shown))

    def text(self, token: int) -> bytes:
        return self.tokens[token] if 0 <= token < len(self.tokens) else b""


def make_table(
    texts: Sequence[str | None], parts: dict[int, bytes], special_ids: Iterable[int], vocab_size: int
) -> TokenTable:
    """Build it from text.vocabulary's columns: texts, and bytes of tokens with parts of characters."""
    tokens = tuple(parts[at] if text is None else text.encode() for at, text in enumerate(texts))
    heads = tokens[:vocab_size]
    blank_ids = frozenset(_where(heads, lambda token: token.isspace() and len(token) <= MAX_BLANK_BYTES))
    half_ids = frozenset(_where(heads, lambda token: token.endswith(_LEAD)))
    others = _where(heads, lambda token: token[:1] in _SECOND)
    other_half_mask = mask_of(others, vocab_size) if half_ids and others else None
    return TokenTable(tokens, frozenset(special_ids), vocab_size, blank_ids, half_ids, other_half_mask)


def _where(tokens: Sequence[bytes], holds: Callable[[bytes], object]) -> list[int]:
    return [at for at, token in enumerate(tokens) if holds(token)]


def mask_of(ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return a row of a bitmask (ceil(vocab_size / 32) words) with these ids set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
