"""End tags as models write them under long contexts: left out, cut, or with one character wrong, missing or too many.

A damaged tag counts only where something follows that can follow the tag: values may hold text that is like one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from bireme.text.parsers.scan import may_become, skip_blanks

PENDING = -1  # more text is needed to say
MIN_NEAR = 6  # characters of a tag that may be one character off

Follows = Callable[[str], int]  # 1: this text can follow the tag, 0: it can't, PENDING


def begins_with(text: str, marks: Collection[str], is_last: bool) -> int:
    """Return 1 if the text begins with one of these, PENDING if it may, else 0."""
    if text.startswith(tuple(marks)):
        return 1
    return PENDING if not is_last and any(may_become(text, mark) for mark in marks) else 0


def goes_on(text: str, marks: Collection[str], is_last: bool) -> int:
    """Return 1 if one of these, or the end of the answer, follows layout, PENDING if it may, else 0."""
    start = skip_blanks(text)
    if start == "":
        return 1 if is_last else PENDING
    return begins_with(start, marks, is_last) if start is not None else 0


def tag_length(text: str, tag: str, is_last: bool, follows: Follows, follows_near: Follows | None = None) -> int:
    """Return how much of the text's start is this tag, perhaps damaged; 0: it is none, PENDING."""
    if text.startswith(tag):
        return len(tag)
    if len(text) > 1 and text[0] not in tag[:2] and text[1] not in tag[:2]:  # wrong in more than one character
        return 0
    same = next((at for at, (one, other) in enumerate(zip(text, tag, strict=False)) if one != other), len(text))
    tries = [(length, follows_near or follows) for length in _near_lengths(text, tag, same)]
    tries += [(length, follows) for length in _cut_lengths(text, tag, same)]
    for length, is_followed in tries:
        answer = is_followed(text[length:]) if length != PENDING else 0 if is_last else PENDING
        if answer == PENDING:
            return PENDING
        if answer and length:
            return length
    return 0


def _near_lengths(text: str, tag: str, same: int) -> list[int]:
    """Return the lengths that a tag with one wrong character, at `same`, has at the start of the text."""
    if len(tag) < MIN_NEAR or same == len(text):
        return []
    lengths = []
    for skipped, tail in ((1, tag[same:]), (1, tag[same + 1 :]), (0, tag[same + 1 :])):  # too many, another, missing
        rest = text[same + skipped :]
        if rest.startswith(tail):
            lengths.append(same + skipped + len(tail))
        elif may_become(rest, tail):
            lengths.append(PENDING)
    return lengths


def _cut_lengths(text: str, tag: str, same: int) -> Iterator[int]:
    """Yield how long a cut tag is: as far as the text is the same, or less, where what follows is like its rest."""
    if same or not text:
        yield same
    yield from (at for at in range(same - 1, 0, -1) if text[at] == tag[0])


class ValueEnds:
    """Finds where a value ends: at its tag, or before what can only follow it."""

    def __init__(self, tag: str, followers: Sequence[str], num_breaks: int) -> None:
        self.tag = tag
        self._followers = followers  # marks, one of which stands behind the tag
        self._num_breaks = num_breaks  # line breaks that are layout at the end of a value without a tag
        self.is_last = False
        self._candidates = re.compile("[" + re.escape(tag[:2]) + "]")  # where it begins, or begins without its bracket

    def find(self, text: str, openings: Sequence[str], is_over: Callable[[str, bool], int], is_last: bool) -> Found:
        """Look for the end. `openings` begin the next value; `is_over` says whether the call ends with a text."""
        self.is_last = is_last
        for match in self._candidates.finditer(text):
            at = match.start()
            length, start = self._length(text, at)
            if not length and text[at] == self.tag[0]:
                length = begins_with(text[at:], openings, is_last) or is_over(text[at:], is_last)
                if length == 1:
                    return Found(self._before(text, at), at, is_end=True, is_implied=True)
            if length == PENDING:
                return Found(self._before(text, start), len(text))
            if length:
                return Found(start, at + length, is_end=True)
        return Found(len(text) if is_last else self._certain(text), len(text))

    def _length(self, text: str, at: int) -> tuple[int, int]:
        """Return the length of the tag that begins here (0: none, PENDING), and where the value before it ends."""
        if text[at] == self.tag[0]:
            is_before_tag = text.startswith(self.tag, at + 1)  # "<</tag>": the first one is the value's
            return 0 if is_before_tag else tag_length(text[at:], self.tag, self.is_last, self.follows), at
        answer = begins_with(text[at:], [self.tag[1:]], self.is_last)
        if answer == 1:
            answer = self.follows(text[at + len(self.tag) - 1 :])
        is_wrong = at >= 2 and self._num_breaks == 2 and text[at - 2] == "\n" != text[at - 1]  # not left out
        return len(self.tag) - 1 if answer == 1 else answer, at - is_wrong

    def follows(self, text: str) -> int:
        return goes_on(text, self._followers, self.is_last)

    def _certain(self, text: str) -> int:
        """Return how much is no layout before a tag that may come."""
        at = len(text)
        if self._num_breaks == 2 and text[-2:-1] == "\n" != text[-1:]:
            at -= 1
        return self._before(text, at)

    def _before(self, text: str, at: int) -> int:
        first = max(at - self._num_breaks, 0)
        return first + len(text[first:at].rstrip("\n"))


class Found(NamedTuple):
    """A value up to `value`; its tag, if it has one, up to `taken`."""

    value: int
    taken: int
    is_end: bool = False
    is_implied: bool = False
