"""Markers in a text that comes in pieces."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection

MAX_TRIMMED = 64  # white space beside a marker that counts as layout; more is text


def split(text: str, markers: tuple[str, ...]) -> tuple[str, str, str]:
    """Cut at the first marker: text before it, the marker, what follows.

    Without a complete marker: certain text, "", and the end that may still become a marker.
    """
    if not markers or _first_letters(markers).search(text) is None:
        return text, "", ""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    keep = 0
    for marker in markers:
        keep = max(keep, _overlap(text, marker))
    return text[: len(text) - keep], "", text[len(text) - keep :]


@functools.lru_cache(maxsize=1024)
def _first_letters(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("[" + re.escape("".join({marker[0] for marker in markers})) + "]")


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`."""
    at = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


def may_become(text: str, marker: str) -> bool:
    """Does `text` begin `marker`, without being all of it?"""
    return len(text) < len(marker) and marker.startswith(text)


def skip_blanks(text: str, limit: int = MAX_TRIMMED) -> str | None:
    """Return what follows the white space at the start; "" while there is nothing else, None past the limit."""
    start = text.lstrip()
    return start if len(text) - len(start) < limit else None


def take_mark(text: str, marks: Collection[str]) -> tuple[str, str] | None:
    """Return the mark behind layout, and what follows it; "" and the text if it is none of these, None if it may be."""
    start = skip_blanks(text)
    if start is None:
        return "", text
    if not start or any(may_become(start, mark) for mark in marks):
        return None
    mark = next((mark for mark in marks if start.startswith(mark)), "")
    return (mark, start[len(mark) :]) if mark else ("", text)


def trim_end(text: str) -> str:
    """Drop the layout at the end."""
    end = text[-MAX_TRIMMED:]
    return text[: len(text) - len(end)] + end.rstrip()


def hold_blanks(text: str) -> tuple[str, str]:
    """Cut off the white space at the end that a marker may yet turn into layout."""
    kept = trim_end(text)
    return kept, text[len(kept) :]
