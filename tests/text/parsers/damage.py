"""Calls whose marks are damaged, each with what has to be read from it: every mark, every kind of damage."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bireme.text.parsers import TOOLS
from bireme.text.parsers.envelope import EnvelopeFormat
from bireme.text.parsers.gemma import GemmaFormat
from bireme.text.parsers.kimi import KimiFormat
from bireme.text.parsers.named import NamedFormat
from bireme.text.parsers.nested import NestedFormat
from bireme.text.parsers.pythonic import PythonicFormat
from bireme.text.parsers.tagged import TaggedFormat
from tests.text.parsers.answers import render_calls

LETTERS = "abzAZ059 \n\"'<>/=|_-:.{}[]é"
VISIBLE = "".join(LETTERS.split())
VALUES = ("Oslo", "a < b", "x/y", "ls 2>&1", "two\nlines", "é😀", "<b>bold</b>", "7")
_KIMI_HEAD = re.compile(r'<\|open\|>call tool="weather" index="[0-9]+"<\|sep\|>')
WHOLE, BEFORE, NONE = "the call", "the call up to the mark", "content"  # what is read


@dataclass(frozen=True)
class Case:
    tools: str
    mark: str  # that was damaged
    kind: str  # of the damage
    text: str
    arguments: dict[str, Any] | None  # of the call; None: all of the text is content
    content: str | None = ""  # beside the call; None: any


def marks_of(tools: str, arguments: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the marks of a rendered call in their order, each with what is read where it is damaged."""
    form = TOOLS[tools]
    if isinstance(form, TaggedFormat):
        return _tags(form, arguments)
    if isinstance(form, NamedFormat):
        return [(form.call[0], NONE), (form.call[1], WHOLE), (form.section[1], WHOLE)]
    if isinstance(form, EnvelopeFormat):
        return [(begin, NONE) for begin in form.begins if not form.is_bare] + [(form.end, WHOLE)] * bool(form.end)
    if isinstance(form, GemmaFormat):
        return [(form.begin, NONE), (form.end, WHOLE)]
    if isinstance(form, PythonicFormat):
        return [(form.begin, NONE)] if tools == "gemma3" else []  # the end of a block of code is content like any
    return []


def _tags(form: TaggedFormat, arguments: dict[str, Any]) -> list[tuple[str, str]]:
    begin, name_end, _ = form.parameter
    header = 'weather" index="1"' if isinstance(form, KimiFormat) else "weather"
    head = [(form.section[0], WHOLE), (form.function[0] + header + form.function[1], NONE)]
    marks = head if form.function[0] else [(form.section[0] + "weather", NONE)]
    for at, key in enumerate(arguments):
        opening = begin + key if begin.endswith('"') else begin + key + name_end
        marks += [(opening, BEFORE if at else NONE), (_value_end(form, key), WHOLE)]
    return [*marks, *([(form.function[2], WHOLE)] if form.function[2] else []), (form.section[1], WHOLE)]


def _value_end(form: TaggedFormat, key: str) -> str:
    return f"{form.parameter[2]}{key}>" if isinstance(form, NestedFormat) else form.parameter[2]


def damaged(mark: str, key: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield each damage of a mark and its kind. The key in it is the model's word: another one is another parameter."""
    first = mark.index(key) if key else len(mark) + 1
    after = first + len(key)
    yield "missing", ""
    for at in range(1, len(mark)):
        if at <= first or at >= after:
            yield "cut", mark[:at]
    for at in range(len(mark)):
        if not first <= at < after:
            yield "one missing", mark[:at] + mark[at + 1 :]
            other = draw.choice(LETTERS.replace(mark[at], "")) if at else "z"
            yield "one wrong", mark[:at] + other + mark[at + 1 :]
        if not first <= at <= after and at and mark not in (instead := mark[:at] + draw.choice(VISIBLE) + mark[at:]):
            yield "one too many", instead


def cases(tools: str, draw: random.Random) -> Iterator[Case]:
    """Yield one call of a format with each damage of each of its marks."""
    arguments: dict[str, Any] = {"city": draw.choice(VALUES), "days": draw.randrange(100)}
    if draw.random() < 0.5:
        arguments = dict(reversed(arguments.items()))
    text, at, num_read = render_calls(tools, [("weather", arguments)]), 0, 0
    for mark, outcome in marks_of(tools, arguments):
        if mark not in text:
            continue  # phi4's template writes another mark, and none at the end
        at = text.index(mark, at)
        if outcome == BEFORE:
            num_read += 1
        key = next((key for key in arguments if key in mark), "")
        for kind, instead in damaged(mark, key, draw):
            whole = text[:at] + instead + text[at + len(mark) :]
            yield Case(tools, mark, kind, whole, *_read(tools, mark, instead, outcome, arguments, num_read))
        at += len(mark)


def _read(
    tools: str, mark: str, instead: str, outcome: str, arguments: dict[str, Any], num_read: int
) -> tuple[dict[str, Any] | None, str | None]:
    """Return what is read: the arguments of a call, and the content beside it."""
    form = TOOLS[tools]
    if tools == "qwen3_coder" and mark.startswith("<parameter=") and instead.removesuffix("\n") == mark[:-1]:
        key = mark.removeprefix("<parameter=")[:-1]  # known, which with its line's end is enough
        is_line = instead.endswith("\n") and isinstance(arguments[key], str)  # another line's end is the value's
        return {**arguments, key: f"\n{arguments[key]}"} if is_line else arguments, ""
    if tools == "kimi_k3" and _KIMI_HEAD.fullmatch(instead):
        return arguments, ""  # a call's number may be any
    before = dict(list(arguments.items())[:num_read])
    if tools == "minimax_m3" and mark.endswith("<city>") and instead == mark[: -len("<city>")]:
        if arguments["city"] == "<b>bold</b>":  # the token that is left makes a tag of it
            return {**before, "b": "bold</b>"}, None
    if outcome == NONE:
        return None, None
    if outcome == BEFORE:
        return before, None
    if not isinstance(form, TaggedFormat):
        return arguments, None if any(begin in instead for begin in getattr(form, "begins", ())) else ""
    if mark == form.section[0]:
        return arguments, instead.strip()  # the inner mark is enough, the outer one is text then
    last = list(arguments)[num_read] if num_read < len(arguments) else ""
    if mark == _value_end(form, last) and not form.is_padded and instead == "z" + mark[1:]:
        return {**arguments, last: f"{arguments[last]}z"}, ""  # nothing tells it from the value
    openings = filter(None, (form.section[0], form.function[0]))
    return arguments, None if any(opening in instead for opening in openings) else ""  # an end without its slash
