"""Calls whose marks are damaged, each with what has to be read from it: every mark, every kind of damage."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
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
            damage = _Damage(tools, mark, instead, outcome, arguments, num_read)
            yield Case(tools, mark, kind, whole, *_read(damage))
        at += len(mark)


@dataclass(frozen=True)
class _Damage:
    tools: str
    mark: str
    instead: str  # what stands in the mark's place
    outcome: str
    arguments: dict[str, Any]  # of the call
    num_read: int  # arguments before the mark

    @property
    def before(self) -> dict[str, Any]:
        return dict(list(self.arguments.items())[: self.num_read])


_Read = tuple[dict[str, Any] | None, str | None]  # the arguments of a call, and the content beside it, as in a Case


def _read(damage: _Damage) -> _Read:
    """Return what is read."""
    read_own = _READ_OWN.get(damage.tools)
    if read_own is not None and (found := read_own(damage)) is not None:
        return found
    if damage.outcome == NONE:
        return None, None
    if damage.outcome == BEFORE:
        return damage.before, None
    form = TOOLS[damage.tools]
    if isinstance(form, TaggedFormat):
        return _read_tags(form, damage)
    return damage.arguments, _beside(damage, getattr(form, "begins", ()))


def _read_tags(form: TaggedFormat, damage: _Damage) -> _Read:
    mark, instead, arguments = damage.mark, damage.instead, damage.arguments
    if mark == form.section[0]:
        return arguments, instead.strip()  # the inner mark is enough, the outer one is text then
    last = list(arguments)[damage.num_read] if damage.num_read < len(arguments) else ""
    if mark == _value_end(form, last) and not form.is_padded and instead == "z" + mark[1:]:
        return {**arguments, last: f"{arguments[last]}z"}, ""  # nothing tells it from the value
    return arguments, _beside(damage, (form.section[0], form.function[0]))


def _beside(damage: _Damage, begins: Iterable[str]) -> str | None:
    """Return the content beside a call; what is left of an end may begin another call: an end without its slash."""
    return None if any(begin and begin in damage.instead for begin in begins) else ""


def _qwen3_coder(damage: _Damage) -> _Read | None:
    """A parameter that is known, with its line's end, is enough."""
    if not damage.mark.startswith("<parameter=") or damage.instead.removesuffix("\n") != damage.mark[:-1]:
        return None
    key = damage.mark.removeprefix("<parameter=")[:-1]
    value = damage.arguments[key]
    is_line = damage.instead.endswith("\n") and isinstance(value, str)  # another line's end is the value's
    return {**damage.arguments, key: f"\n{value}"} if is_line else damage.arguments, ""


def _kimi_k3(damage: _Damage) -> _Read | None:
    """A call's number may be any."""
    return (damage.arguments, "") if _KIMI_HEAD.fullmatch(damage.instead) else None


def _minimax_m3(damage: _Damage) -> _Read | None:
    """Without its tag, the token that is left makes a tag of what the value begins with."""
    is_left = damage.mark.endswith("<city>") and damage.instead == damage.mark.removesuffix("<city>")
    if not is_left or damage.arguments["city"] != "<b>bold</b>":
        return None
    return {**damage.before, "b": "bold</b>"}, None


# What a format reads all the same: damage -> what is read; None: as all formats do.
_READ_OWN: dict[str, Callable[[_Damage], _Read | None]] = {
    "qwen3_coder": _qwen3_coder,
    "kimi_k3": _kimi_k3,
    "minimax_m3": _minimax_m3,
}
