"""Calls whose arguments are elements named by their keys, objects and lists in them too: MiniMax M3.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Paris]<]minimax[>[</city>
    ]<]minimax[>[<days>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</days>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

(Nothing stands between an argument's elements.) The token before each tag tells tags from text. What may only be a
string streams; everything else comes when it is whole. An element that holds others is a list where all of them are
`item` and its schema allows one, else an object; a key that comes twice makes a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.envelope import MAX_HEAD
from bireme.text.parsers.guides import call_tags, separated, structural_tag
from bireme.text.parsers.json_text import json_text
from bireme.text.parsers.scan import may_become, skip_blanks, split
from bireme.text.parsers.schema_types import UNSTATED, FunctionTypes, ValueType
from bireme.text.parsers.tag_ends import PENDING, ValueEnds, begins_with, tag_length
from bireme.text.parsers.tagged import TaggedFormat, TaggedParser

MAX_DEPTH = 64  # of elements within one argument
_ITEM = "item"


@dataclass(frozen=True)
class NestedFormat(TaggedFormat):
    """An entry of the table. `parameter`: before and after a key, before the key of an end tag."""

    def parser(self, request: ParserRequest) -> Parser:
        return NestedParser(self, request)

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        (first, last), (begin, name_end, end) = self.section, self.function
        tags = call_tags(functions, lambda name: begin + name + name_end, f"{end}\n", self.style)
        return structural_tag(f"{first}\n", separated(tags, "", is_parallel), last)


@dataclass
class _Element:
    """One that is open, with what has come of it."""

    name: str
    type: ValueType
    types: FunctionTypes  # of what it may hold
    ends: ValueEnds
    text: str = ""
    children: list[tuple[str, str]] = field(default_factory=list)  # name and JSON
    known: frozenset[str] = frozenset()  # keys that the schema names

    def __post_init__(self) -> None:
        self.known = self.types.keys()

    @property
    def may_hold(self) -> bool:
        return self.type is UNSTATED or bool(self.type.kinds & {"array", "object"})

    @property
    def is_list(self) -> bool:
        """Whether a child named `item` is one of a list."""
        kinds = self.type.kinds
        return "object" not in kinds or ("array" in kinds and _ITEM not in self.known)

    def as_json(self) -> str:
        if not self.children:
            return self._text_as_json()
        if self.is_list and all(name == _ITEM for name, _ in self.children):
            return f"[{', '.join(value for _, value in self.children)}]"
        values: dict[str, list[str]] = {}
        for name, value in self.children:
            values.setdefault(name, []).append(value)
        shown = (f"{json_text(name)}: {_one_or_list(each)}" for name, each in values.items())
        return f"{{{', '.join(shown)}}}"

    def _text_as_json(self) -> str:
        kinds = self.type.kinds
        if self.text.strip() or "string" in kinds or not kinds & {"array", "object"}:
            return self.type.as_json(self.text)
        return "[]" if "array" in kinds else "{}"


def _one_or_list(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


class NestedParser(TaggedParser):
    def __init__(self, form: NestedFormat, request: ParserRequest) -> None:
        super().__init__(form, request)
        self._tag = form.parameter[0]  # all tags begin so
        self._open: list[_Element] = []  # of the value at hand, the outermost first

    def _opens_parameter(self, start: str) -> int:
        """Ends and other calls begin like a parameter: its key tells it from them."""
        if not start.startswith(self._tag):
            return super()._opens_parameter(start)
        key, end, _ = split(start[len(self._tag) : MAX_HEAD], (">",))
        if key in self._openings and end:
            return 1
        if not end:
            return PENDING if len(start) < MAX_HEAD else 0
        if start.startswith((*self.begins, *self.ends)):
            return 0
        length = self._end_length(start)
        return PENDING if length == PENDING else int(not length)

    def _value_begin(self, text: str) -> str:
        rest = super()._value_begin(text)
        self._value_ends = self._ends_of(self._key)
        if not self._is_streamed:
            self._open = [_Element(self._key, self._type, self._types.within(self._key), self._value_ends)]
            self._state = self._inside
        return rest

    def _may_stream(self) -> bool:
        return self._type.is_text and self._type is not UNSTATED

    def _ends_of(self, name: str) -> ValueEnds:
        return _ElementEnds(f"{self._form.parameter[2]}{name}>", (self._tag,), 1)

    def _inside(self, text: str) -> str:
        """Behind a tag of an element: one that it holds, its end or its text."""
        element, start = self._open[-1], skip_blanks(text)
        begins = begins_with(start, (self._tag,), is_last=False) if start is not None else 0
        if begins == 0 and not element.children:
            self._state = self._text
            return text
        if not start or begins == PENDING:
            return self._hold(text)
        if begins:
            return self._take_tag(text, start)
        length = tag_length(start, element.ends.tag, False, element.ends.follows)
        if length == PENDING:
            return self._hold(text)
        return self._close_elements(1, start[length:]) if length else self._break_value(text)

    def _take_tag(self, text: str, start: str) -> str:
        element = self._open[-1]
        name, end, _ = split(start[len(self._tag) : MAX_HEAD], (">",))
        if not end and len(start) < MAX_HEAD:
            return self._hold(text)
        if not element.children:
            element.text = text[: len(text) - len(start)]
        number, taken = self._ended(start, name)
        if number:
            return self._close_elements(number, start[taken:])
        if not end or name.startswith("/") or not self._is_child(element, name):
            return self._take_end(text, start, name)
        if len(self._open) == MAX_DEPTH:
            return self._break_value(start)
        self._open.append(self._child(element, name))
        return start[len(self._tag) + len(name) + 1 :]

    def _ended(self, start: str, name: str) -> tuple[int, int]:
        """Return how many elements a tag ends, and how much of the text it is; it may be one behind them all."""
        for number, one in enumerate(reversed(self._open), 1):
            if start.startswith(one.ends.tag):
                return number, len(one.ends.tag)
        is_behind = start.startswith((*self.ends, *self.begins)) or self._is_next(name)
        return len(self._open) if is_behind else 0, 0

    def _child(self, element: _Element, name: str) -> _Element:
        types = element.types
        if name == _ITEM and element.is_list:
            return _Element(name, types.of_items(), types.items(), self._ends_of(name))
        return _Element(name, types.of(name), types.within(name), self._ends_of(name))

    def _take_end(self, text: str, start: str, name: str) -> str:
        """The element ends here, by a damaged tag or none."""
        ends = self._open[-1].ends
        length = tag_length(start, ends.tag, False, ends.follows)
        if length == PENDING:
            return self._hold(text)
        return self._close_elements(1, start[length:]) if length or name[:1] != "/" else self._break_value(start)

    def _is_next(self, name: str) -> bool:
        """Whether a tag is the call's next argument, and none that an open element can hold."""
        return name in self._openings and not any(
            one.type is UNSTATED or name in one.known for one in self._open if one.may_hold
        )

    def _is_child(self, element: _Element, name: str) -> bool:
        """A tag like the element's own end is one behind what it holds, unless its schema knows such a key."""
        if not element.may_hold:
            return False
        return name in element.known or not (element.children and element.known and name == element.name)

    def _text(self, text: str) -> str:
        element = self._open[-1]
        found = element.ends.find(text, (self._tag,), _never, is_last=False)
        element.text += text[: found.value]
        if not found.is_end:
            return self._hold(text[found.value :])
        return self._close_elements(1, text[found.taken :])

    def _close_elements(self, number: int, rest: str) -> str:
        for _ in range(number):
            element = self._open.pop()
            value, self._state = element.as_json(), self._inside
            if self._open:
                self._open[-1].children.append((element.name, value))
            else:
                self._add(self._key_json() + value)
                self._keys.add(self._key)
                self._state = self._parameter
        return rest

    def _break_value(self, text: str) -> str:
        self._close_elements(len(self._open), "")
        return self._break_call(text)

    def _end(self, is_cut: bool) -> None:
        if self._state in (self._inside, self._text):
            self._end_in_element(is_cut)
        else:
            super()._end(is_cut)

    def _end_in_element(self, is_cut: bool) -> None:
        element = self._open[-1]
        if not element.children:
            found = element.ends.find(self._held, (self._tag,), _never, is_last=True)
            element.text += self._held[: found.value]
        self._held = ""
        self._close_elements(len(self._open), "")
        self._end_between(is_cut)


class _ElementEnds(ValueEnds):
    """An end tag that another tag follows, but not itself."""

    def follows(self, text: str) -> int:
        start, answer = skip_blanks(text), super().follows(text)
        if answer != 1 or not start:
            return answer
        if start.startswith(self.tag):
            return 0
        return PENDING if not self.is_last and may_become(start, self.tag) else 1


def _never(text: str, is_last: bool) -> int:
    return 0
