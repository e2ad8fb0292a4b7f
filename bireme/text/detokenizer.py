"""Tokens in, text out, piece by piece: no character is split, no space lost, nothing held longer than needed.

The output after n tokens depends on those tokens alone, not on how they were cut into pushes. At most three bytes, the
start of a character, are held back; `flush` returns them as U+FFFD. All pieces together are what decoding all tokens at
once gives, but for a run of byte tokens that is not valid UTF-8: here its valid characters stay.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from bireme.text.vocabulary import Vocabulary


class Detokenizer(Protocol):
    """The text of one sequence. Used from one thread at a time."""

    def push(self, tokens: Sequence[int]) -> str:
        """Take tokens and return the text that is certain now. Ids outside the vocabulary have no text."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """As `push`, split by the token that completed each text; none is empty."""

    def flush(self) -> str:
        """Return what is held back. Nothing may be pushed afterwards."""


class TableDetokenizer:
    """Looks every token up and joins the UTF-8."""

    __slots__ = ("_held", "_parts", "_texts")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts = vocabulary.texts
        self._parts = vocabulary.parts
        self._held = b""

    def push(self, tokens: Sequence[int]) -> str:
        if len(tokens) == 1 and not self._held:  # a step at a time
            try:
                text = self._texts[tokens[0]]
            except IndexError:
                return ""
            if text is not None:
                return text
        return "".join(self.pieces(tokens))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        if not self._held:  # tokens that waited for a sender
            try:
                texts = [self._texts[token] for token in tokens]
            except IndexError:
                texts = [None]
            if all(texts):  # none is a part of a character, without text, or unknown
                return texts  # type: ignore[return-value]
        return [piece for token in tokens if (piece := self._push(token))]

    def _push(self, token: int) -> str:
        text = self._texts[token] if token < len(self._texts) else ""
        if text is None:
            text, taken = codecs.utf_8_decode(data := self._held + self._parts[token], "replace", False)
            self._held = data[taken:]
        elif text and self._held:
            text = self.flush() + text
        return text

    def flush(self) -> str:
        text, self._held = self._held.decode(errors="replace"), b""
        return text


class WindowDetokenizer:
    """For decoders that look at neighbors: decodes the last few tokens again with every token.

    An unfinished character shows as one U+FFFD at the end, which is held back.
    """

    __slots__ = ("_num_out", "_skip", "_tokenizer", "_window")

    _MAX_TOKENS = 16
    _CONTEXT = 8  # tokens that stay in the window, for decoders that look back and for unfinished characters

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_out = 0  # characters of the window's text that are out

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(self.pieces(tokens))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [piece for token in tokens if (piece := self._push(token))]

    def _push(self, token: int) -> str:
        if self._tokenizer.id_to_token(token) is None:
            return ""
        self._window.append(token)
        text = self._text()
        num_held = int(text.endswith("\ufffd"))
        certain = len(text) - num_held
        news, self._num_out = text[self._num_out : certain], max(certain, self._num_out)
        if len(self._window) > self._MAX_TOKENS:
            del self._window[: -self._CONTEXT]
            self._num_out = max(0, len(self._text()) - num_held)
        return news

    def flush(self) -> str:
        return self._text()[self._num_out :]

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=self._skip)
        return text
