"""A guide that holds from a token on: the calls in an answer that need not have any.

    thinking    (only with reasoning_end) what is in the reasoning triggers nothing
    free        nothing is denied, until the token of the trigger comes
    guided      what the grammar allows, until it is complete; then free again
    over        (only with stop_after_first) the end of the answer
While it thinks or is free a row costs no mask.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from bireme.errors import RequestError
from bireme.guides import Trigger
from bireme.logits.guided.guidance import Bitmask, Guidance
from bireme.logits.guided.vocabulary import TokenTable
from bireme.own_work import NO_MARK


class _Hold(enum.Enum):
    BEGIN = enum.auto()  # what has come may become the beginning of reasoning
    THINKING = enum.auto()
    FREE = enum.auto()
    GUIDED = enum.auto()
    OVER = enum.auto()


class TriggeredGuidance(Guidance):
    __slots__ = ("_begin", "_hold", "_seen", "_thought_end", "_trigger")

    is_whole = False

    def __init__(
        self,
        compiled: Any,
        table: TokenTable,
        stop_ids: Sequence[int],
        trigger: Trigger,
        reasoning_end: str = "",
        max_fill_s: float = 1.0,
        mark: AbstractContextManager[None] = NO_MARK,
    ) -> None:
        """Raises RequestError where the grammar does not begin with the trigger's text."""
        super().__init__(compiled, table, stop_ids, "", max_fill_s, mark)
        with mark:
            if not self._matcher.accept_token(trigger.token):
                text = table.text(trigger.token).decode(errors="replace")
                raise RequestError(
                    f"guided_decoding.trigger.token: {trigger.token} ({text!r}) does not begin what the guide allows;"
                    " send the token that its text begins with"
                )
            self._matcher.reset()
        self._trigger = trigger
        self._thought_end, self._begin = reasoning_end.encode(), trigger.reasoning_begin.encode()
        self._seen = b""  # of the answer's beginning, or of what may be the end of the reasoning
        self._hold = _Hold.FREE
        if reasoning_end:
            self._hold = _Hold.BEGIN if self._begin else _Hold.THINKING
        self.is_free = True

    def fill(self, bitmask: Bitmask, row: int) -> None:
        if self._hold is _Hold.OVER:
            bitmask[row] = self._stop_mask
            self.must_stop = True
        else:
            super().fill(bitmask, row)

    def accept(self, token: int) -> None:
        if self._hold is _Hold.GUIDED:
            self._follow(token)
        elif self._hold is _Hold.OVER:
            if token not in self._stop_ids:
                raise RequestError(
                    f"guided_decoding: token {token} follows the one guided part; send no more than that"
                )
        elif token == self._trigger.token and self._hold is not _Hold.THINKING:
            self._hold, self.is_free = _Hold.GUIDED, False
            super().accept(token)
        elif self._hold is not _Hold.FREE:
            self._read(self._table.text(token))

    def _follow(self, token: int) -> None:
        super().accept(token)
        if not self._matcher.is_completed():
            return
        self.must_stop = False
        if self._trigger.stop_after_first:
            self._hold = _Hold.OVER
            return
        self._matcher.reset()
        self._hold, self.is_free = _Hold.FREE, True

    def _read(self, text: bytes) -> None:
        self._seen += text
        if self._hold is _Hold.BEGIN:
            start = self._seen.lstrip()
            if not start.startswith(self._begin):
                if not self._begin.startswith(start):
                    self._hold = _Hold.FREE
                return
            self._hold, self._seen = _Hold.THINKING, start[len(self._begin) :]
        if self._thought_end in self._seen:
            self._hold = _Hold.FREE
        else:
            self._seen = self._seen[max(0, len(self._seen) - len(self._thought_end) + 1) :]
