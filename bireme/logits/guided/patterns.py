"""JSON Schema's patterns for xgrammar: they are searched for, while its grammars match the whole text.

A text without an anchor gets `.*` on that side. Every class is written out without what JSON text must escape (quotes,
backslashes, control characters).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Ranges = list[tuple[int, int]]

_NO_LENGTH = "a length beside it can't be enforced; put it into the pattern, as in ^[a-z]{2,5}$"
LAST = 0x10FFFF
_ESCAPED: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]  # what no text has as it is
_DIGIT: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_BLANK: Ranges = [
    *[(9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)],
    *[(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)],
]
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SPECIAL = frozenset("\\^$.|?*+()[]{}/-")
_PYTHONS_OWN = re.compile(r"\\[AZabf]|\(\?[aiLmsux-]|\(\?P|\(\?#|\{,")  # means something else to ECMA 262


def search(pattern: str, value: str) -> bool:
    """Raises ValueError."""
    try:
        return re.search(pattern, value) is not None
    except re.error as error:
        raise ValueError(str(error)) from error


def whole_pattern(pattern: str, shortest: int = 0, longest: int | None = None) -> str:
    """Return what the whole of a text matches that it is found in. Raises ValueError."""
    tree = parsed(pattern)
    if shortest or longest is not None:
        tree = _within(tree, shortest, longest)
    return _sequence(list(tree), True, True)


def literal_prefix(pattern: str) -> str:
    """Return what each text that it is found in begins with; "": unknown."""
    items = list(parsed(pattern))
    if not items or items[0] != (op.AT, op.AT_BEGINNING):
        return ""
    found = ""
    for code, value in items[1:]:
        if code is not op.LITERAL:
            break
        found += chr(value)
    return found


def any_text(shortest: int, longest: int | None) -> str:
    return f"{_ANY}{{{shortest},{'' if longest is None else longest}}}"


def other_than(names: Iterable[str], prefixes: Iterable[str]) -> str:
    """Return a pattern of texts that are none of `names` and begin with none of `prefixes`; "": all."""
    root: dict[str, Any] = {}
    for ends, texts in (("", names), ("*", prefixes)):  # keys of more or less than one character: what ends here
        for text in texts:
            node = root
            for character in text:
                node = node.setdefault(character, {})
            node[ends] = {}
            if ends:
                node["*"] = {}
    return _other(root) if root else ""


def _other(node: dict[str, Any]) -> str:
    if "*" in node:
        return ""
    ahead = {ord(character): inner for character, inner in node.items() if character}
    ways = [] if "" in node else ["()"]
    others = usable(_without([(0, LAST)], [(code, code) for code in ahead]))
    ways.append(f"{character_class(others)}{_ANY}*")
    for code, inner in ahead.items():
        if usable([(code, code)]) and (rest := _other(inner)):
            ways.append(_literal(code) + rest)
    return f"({'|'.join(ways)})"


def parsed(pattern: str) -> Any:
    if found := _PYTHONS_OWN.search(pattern):
        raise ValueError(f"{found[0]} is not supported")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it can't be read ({error})") from error


def _sequence(items: list[Any], is_left_edge: bool, is_right_edge: bool) -> str:
    is_left_edge = is_left_edge and not _stripped(items, 0, op.AT_BEGINNING)
    is_right_edge = is_right_edge and not _stripped(items, -1, op.AT_END)
    before, after = _margin(is_left_edge, items[:1]), _margin(is_right_edge, items[-1:])
    last = len(items) - 1
    inner = [
        _item(item, is_left_edge and not before and at == 0, is_right_edge and not after and at == last)
        for at, item in enumerate(items)
    ]
    return before + "".join(inner) + after


def _stripped(items: list[Any], at: int, anchor: Any) -> bool:
    """Take the anchors at one end away; whether there were any."""
    size = len(items)
    while items and items[at] == (op.AT, anchor):
        del items[at]
    return len(items) < size


def _margin(is_edge: bool, outermost: list[Any]) -> str:
    return f"{_ANY}*" if is_edge and not any(map(_has_anchor, outermost)) else ""


def _has_anchor(item: Any) -> bool:
    code, value = item
    if code is op.AT:
        return True
    if code is op.SUBPATTERN:
        return any(map(_has_anchor, value[3]))
    return code is op.BRANCH and any(_has_anchor(inner) for way in value[1] for inner in way)


def _item(item: Any, is_left_edge: bool, is_right_edge: bool) -> str:
    code, value = item
    if code is op.LITERAL:
        return _literal(value)
    if code in (op.NOT_LITERAL, op.ANY, op.IN):
        return character_class(usable(ranges_of(code, value)))
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        low, high, body = value
        most = "" if high is op.MAXREPEAT else int(high)
        return f"({_sequence(list(body), False, False)}){{{low},{most}}}"
    if code is op.SUBPATTERN:
        if any(value[1:3]):
            raise ValueError("flags are not supported")
        return f"({_sequence(list(value[3]), is_left_edge, is_right_edge)})"
    if code is op.BRANCH:
        return f"({'|'.join(_sequence(list(way), is_left_edge, is_right_edge) for way in value[1])})"
    name = "anchors and word borders within it are" if code is op.AT else f"{str(code).lower().replace('_', ' ')} is"
    raise ValueError(f"{name} not supported")


def ranges_of(code: Any, value: Any) -> Ranges:
    if code is not op.IN:
        return _RANGES[code](value)
    found = [one for kind, inner in value for one in _RANGES[kind](inner)]
    return _without([(0, LAST)], found) if value and value[0][0] is op.NEGATE else found


def _literal(code: int) -> str:
    if not usable([(code, code)]):
        raise ValueError("quotes, backslashes and control characters are not supported")
    return _character(code)


def character_class(ranges: Ranges) -> str:
    if not ranges:
        raise ValueError("quotes, backslashes and control characters are not supported")
    return "[" + "".join(_character(low) + (f"-{_character(high)}" if high > low else "") for low, high in ranges) + "]"


def _character(code: int) -> str:
    if code > 0x7E:
        return f"\\u{{{code:x}}}"
    return f"\\{chr(code)}" if chr(code) in _SPECIAL else chr(code)


def usable(ranges: Ranges) -> Ranges:
    return _without(sorted(ranges), _ESCAPED)


def _without(ranges: Sequence[tuple[int, int]], holes: Iterable[tuple[int, int]]) -> Ranges:
    left = list(ranges)
    for low, high in holes:
        left = [
            part
            for first, last in left
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1] and not (low <= part[0] <= high)
        ]
        left = sorted(set(left))
    return left


def _within(tree: Any, shortest: int, longest: int | None) -> list[Any]:
    """Hold the items to a length, as far as one repeat of single characters can."""
    items = list(tree)
    is_whole = items[:1] + items[-1:] == [(op.AT, op.AT_BEGINNING), (op.AT, op.AT_END)]
    least, most = tree.getwidth()
    if least >= shortest and (longest is None or (is_whole and most <= longest)):
        return items
    repeats = [at for at, item in enumerate(items) if _is_free(item)]
    if not is_whole or not repeats:
        raise ValueError(_NO_LENGTH)
    free = max(repeats, key=lambda at: width_of(items[at])[1])
    widths = [width_of(item) for item in (*items[:free], *items[free + 1 :])]
    items[free] = _limited(items[free], widths, shortest, longest)
    return items


def _limited(repeat: Any, others: list[tuple[int, int]], shortest: int, longest: int | None) -> Any:
    code, (low, high, body) = repeat
    low = max(int(low), shortest - sum(width for width, _ in others))
    if longest is not None:
        high = min(int(high), longest - sum(width for _, width in others))
    if low > int(high):
        raise ValueError(_NO_LENGTH)
    return code, (low, high, body)


def _is_free(item: Any) -> bool:
    return item[0] in (op.MAX_REPEAT, op.MIN_REPEAT) and item[1][2].getwidth() == (1, 1)


def width_of(item: Any) -> tuple[int, int]:
    one = parser.SubPattern(parser.State(), [item])
    low, high = one.getwidth()
    return int(low), int(high)


_CATEGORIES = {
    op.CATEGORY_DIGIT: _DIGIT,
    op.CATEGORY_NOT_DIGIT: _without([(0, LAST)], _DIGIT),
    op.CATEGORY_WORD: _WORD,
    op.CATEGORY_NOT_WORD: _without([(0, LAST)], _WORD),
    op.CATEGORY_SPACE: _BLANK,
    op.CATEGORY_NOT_SPACE: _without([(0, LAST)], [*_BLANK, (0xFEFF, 0xFEFF)]),
}
_RANGES: dict[Any, Callable[[Any], Ranges]] = {
    op.ANY: lambda _: _without([(0, LAST)], _LINE_ENDS),
    op.LITERAL: lambda code: [(code, code)],
    op.NOT_LITERAL: lambda code: _without([(0, LAST)], [(code, code)]),
    op.RANGE: lambda ends: [ends],
    op.CATEGORY: lambda category: _CATEGORIES[category],
    op.NEGATE: lambda _: [],
}
_ANY = character_class(usable([(0, LAST)]))
