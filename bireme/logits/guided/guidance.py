"""One sequence's way through its guide.

    reasoning   (only with reasoning_end) everything but the end of the answer is allowed
    gap         after it, up to two tokens of white space beside what the grammar allows
    guided      what the grammar allows; the stop ids once it is complete
The state follows from the tokens alone: a sequence that moves to another engine replays them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from bireme.errors import BiremeError, RequestError
from bireme.logits.guided.vocabulary import TokenTable, mask_of
from bireme.own_work import NO_MARK

Bitmask = npt.NDArray[np.int32]  # (rows, ceil(vocab / 32)), bit 1: allowed


MAX_GAP_TOKENS = 2  # models are trained to break the line once or twice after their reasoning


class Guidance:
    """Belongs to the engine's thread once it is made."""

    __slots__ = (
        *("_blank_mask", "_blanks", "_end", "_gap", "_is_half", "_mark", "_matcher", "_max_fill_s", "_others"),
        *("_stop_ids", "_stop_mask", "_table", "_tail", "is_free", "must_stop"),
    )

    is_whole = True  # some token is denied from the first to the last

    def __init__(
        self,
        compiled: Any,
        table: TokenTable,
        stop_ids: Sequence[int],
        reasoning_end: str = "",
        max_fill_s: float = 1.0,
        mark: AbstractContextManager[None] = NO_MARK,
    ) -> None:
        """`mark`: is held while the matcher works."""
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        self._table = table
        self._stop_ids = frozenset(stop_ids)
        self._stop_mask = mask_of(stop_ids, table.vocab_size)
        self._others = ~self._stop_mask
        self._end = reasoning_end.encode()
        self._tail: bytes | None = b"" if reasoning_end else None  # None: reasoning is over
        self._gap = 0  # tokens of white space that are still free
        self._is_half = False  # the last token ends in what may be the beginning of a surrogate
        self._blanks = table.blank_ids
        self._blank_mask = mask_of(sorted(self._blanks), table.vocab_size) if reasoning_end else None
        self._max_fill_s = max_fill_s
        self._mark = mark
        self.is_free = False  # every token may come next, the end of the answer too: there is nothing to fill
        self.must_stop = False  # after `fill`: nothing but the end of the answer is allowed

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write which tokens may come next. Raises RequestError for a grammar that is too slow or a dead end."""
        if self._tail is not None:
            bitmask[row] = self._others
            self.must_stop = False
            return
        began = time.thread_time()
        with self._mark:
            self._matcher.fill_next_token_bitmask(bitmask, row)
        self._check_speed(time.thread_time() - began)
        words = bitmask[row]
        if self._gap and self._blank_mask is not None:
            words |= self._blank_mask
        if self._is_half and self._table.other_half_mask is not None:
            words &= ~self._table.other_half_mask
        self.must_stop = not (words & self._others).any()
        if self.must_stop and not words.any():
            raise RequestError("guided_decoding: no token leads on from here; nothing can satisfy this guide")

    def accept(self, token: int) -> None:
        """Raises RequestError for a token that the guide does not allow."""
        if self._tail is not None:
            self._think(token)
            return
        if self._gap and token in self._blanks:
            self._gap -= 1
            return
        self._gap = 0
        self._is_half = token in self._table.half_ids
        began = time.thread_time()
        with self._mark:
            is_accepted = self._matcher.accept_token(token)
        if not is_accepted:
            raise RequestError(f"guided_decoding: token {token} is not allowed here; send the guide it was made with")
        self._check_speed(time.thread_time() - began)

    def _think(self, token: int) -> None:
        assert self._tail is not None
        if token in self._stop_ids:
            raise BiremeError(f"guided_decoding: stop token {token} came before the end of the reasoning")
        text = self._tail + self._table.text(token)
        at = text.find(self._end)
        if at < 0:
            self._tail = text[len(text) - min(len(text), len(self._end) - 1) :]
            return
        self._tail, self._gap = None, MAX_GAP_TOKENS
        rest = text[at + len(self._end) :].lstrip()
        if not rest:
            return
        self._gap = 0
        with self._mark:
            is_accepted = self._matcher.accept_string(rest)
        if not is_accepted:
            raise RequestError(
                "guided_decoding.reasoning_end: the token that holds it goes on with what is not allowed"
            )

    def _check_speed(self, seconds: float) -> None:
        if seconds > self._max_fill_s:
            raise RequestError(
                f"guided_decoding: one token took {seconds * 1e3:.0f} ms of work;"
                f" guided_decoding_config.max_token_ms is {self._max_fill_s * 1e3:.0f}; simplify the guide"
            )


def allocate(num_rows: int, vocab_size: int) -> Bitmask:
    return np.full((num_rows, num_words(vocab_size)), -1, dtype=np.int32)


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
