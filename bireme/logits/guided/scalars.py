"""Numbers and texts that satisfy several schemas at once, in xgrammar's words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from bireme.logits.guided.automaton import joint_pattern
from bireme.logits.guided.keywords import NUMBER_KEYWORDS
from bireme.logits.guided.patterns import whole_pattern
from bireme.logits.guided.references import UnsupportedError

Schema = dict[str, Any]

MAX_INTEGER = (1 << 63) - 1
_GRID = 10**6
_MAX_MULTIPLE, _MAX_MULTIPLE_WIDTH = 1024, 10_000  # xgrammar drops what is beyond
_POINTER = "(/([^~/]|~[01])*)*"
_DAYS = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE, _CLOCK = f"[0-9]{{4}}-{_DAYS}", "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9]([.][0-9]+)?(Z|[+-]{_CLOCK})"
_TIMES = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DATES = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_BYTE, _GROUP = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])", "[0-9a-fA-F]{1,4}"
_URI = "[a-z]{3,6}://[a-z0-9][A-Za-z0-9._~/?&=+-]*"
# Shortest, longest, and a plainer pattern for what stands beside it.
FORMATS: dict[str, tuple[int, int | None, str]] = {
    "date": (10, 10, f"^{_DATE}$"),
    "time": (9, None, f"^{_TIME}$"),
    "date-time": (20, None, f"^{_DATE}T{_TIME}$"),
    "duration": (3, None, f"^P([0-9]+W|{_DATES}({_TIMES})?|{_TIMES})$"),
    "ipv4": (7, 15, f"^({_BYTE}[.]){{3}}{_BYTE}$"),
    "ipv6": (2, None, f"^(({_GROUP}:){{7}}{_GROUP}|({_GROUP})?::({_GROUP})?)$"),
    "uuid": (36, 36, "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"),
    "hostname": (1, None, "^[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?$"),
    "email": (3, None, "^[A-Za-z0-9_+-]+@[a-z0-9]{1,24}([.][a-z]{2,6}){1,3}$"),
    "uri": (2, None, f"^{_URI}$"),
    "uri-reference": (0, None, f"^{_URI}$"),
    "uri-template": (0, None, f"^{_URI}$"),
    "json-pointer": (0, None, f"^{_POINTER}$"),
    "relative-json-pointer": (1, None, f"^(0|[1-9][0-9]*)(#|{_POINTER})$"),
}
_NOT_XGRAMMARS = ("json-pointer", "relative-json-pointer")  # lets quotes through as they are


class NothingError(ValueError):
    """No value satisfies the schemas."""


Bound = tuple[str, float]  # a keyword and what it says


def bounds(flats: Sequence[Schema], of: str) -> tuple[int, int | None]:
    low = max((math.ceil(flat.get(f"min{of}", 0)) for flat in flats), default=0)
    return low, min((math.floor(flat[f"max{of}"]) for flat in flats if f"max{of}" in flat), default=None)


def sized(of: str, low: int, high: int | None) -> Schema:
    return ({f"min{of}": low} if low else {}) | ({} if high is None else {f"max{of}": high})


def number(name: str, flats: Sequence[Schema]) -> Schema:
    steps = [Fraction(str(flat["multipleOf"])) for flat in flats if "multipleOf" in flat]
    ends = {"minimum": _tightest(flats, "minimum", max), "maximum": _tightest(flats, "maximum", min)}
    found = {keyword: bound for keyword, bound in ends.items() if bound is not None}
    if name == "number" and not steps:
        return _real(found, flats)
    if name == "number" and max(step.denominator for step in steps) > 1:
        reason = "multipleOf of a fraction can't be enforced; leave it out, or send integers"
        raise UnsupportedError(_holder_of("multipleOf", flats), "multipleOf", reason)
    return _integer(found, math.lcm(*(step.numerator for step in steps)), flats)


def _tightest(flats: Sequence[Schema], name: str, choose: Callable[..., Bound | None]) -> Bound | None:
    words = (f"exclusive{name.title()}", name)  # of equal ones the first
    given = [(word, flat[word]) for word in words for flat in flats if word in flat]
    return choose(given, key=lambda bound: bound[1], default=None)


def _holder_of(keyword: str, flats: Sequence[Schema]) -> Schema:
    return next(flat for flat in flats if keyword in flat)


def _real(ends: dict[str, Bound], flats: Sequence[Schema]) -> Schema:
    if len(ends) == 2:
        (low_word, low), (high_word, high) = ends.values()
        if low > high or (low == high and (low_word, high_word) != ("minimum", "maximum")):
            raise NothingError(f"no number is within {low} and {high}")
        if low == high:
            return {"enum": [low]}
        if not _has_grid_number(low, high):
            holder, word = next((flat, word) for flat in flats for word in NUMBER_KEYWORDS if word in flat)
            raise UnsupportedError(
                holder, word, f"numbers between {low} and {high} can't be enforced: six decimals are; send wider bounds"
            )
    return {"type": "number", **dict(ends.values())}


def _integer(ends: dict[str, Bound], step: int, flats: Sequence[Schema]) -> Schema:
    whole = {name: _rounded(name, bound, flats) for name, bound in ends.items()}
    if len(whole) == 2:
        first, last = whole.values()
        if -(-first // step) * step > last:
            what = "integer" if first > last else f"multiple of {step}"
            raise NothingError(f"no {what} is within {first} and {last}")
        has_steps = last - first < _MAX_MULTIPLE_WIDTH
    else:
        has_steps = not whole and step <= _MAX_MULTIPLE
    if step == 1:
        return {"type": "integer", **whole}
    if has_steps:
        return {"type": "integer", **whole, "multipleOf": step}
    raise UnsupportedError(
        _holder_of("multipleOf", flats), "multipleOf", f"multipleOf {step} can't be enforced here: up to"
        f" {_MAX_MULTIPLE} without minimum and maximum, or with both and at most {_MAX_MULTIPLE_WIDTH} integers between"
        " them",
    )  # fmt: skip


def _rounded(name: str, bound: Bound, flats: Sequence[Schema]) -> int:
    sign = 1 if name == "minimum" else -1
    word, value = bound
    whole = sign * (math.ceil(sign * value) if word == name else math.floor(sign * value) + 1)
    if abs(whole) > MAX_INTEGER:
        words = (name, f"exclusive{name.title()}")
        holder, word = next((flat, word) for flat in flats for word in words if word in flat)
        raise UnsupportedError(holder, word, f"{word}: {whole}; integers of 64 bits are enforced")
    return whole


def string(flats: Sequence[Schema]) -> Schema:
    shortest, longest = bounds(flats, "Length")
    patterns = _holders(flats, "pattern")
    formats = {name: flat for name, flat in _holders(flats, "format").items() if name in FORMATS}
    if longest is not None and shortest > longest:
        raise NothingError(f"no text has {shortest} to {longest} characters")
    if not patterns and _is_exact(list(formats), shortest, longest):
        return {"type": "string", "format": next(iter(formats))}
    if patterns or formats:
        return {"type": "string", "pattern": _matching(patterns, formats, shortest, longest)}
    return {"type": "string", **sized("Length", shortest, longest)}


def _holders(flats: Sequence[Schema], keyword: str) -> dict[str, Schema]:
    return {flat[keyword]: flat for flat in flats if keyword in flat}


def _is_exact(formats: Sequence[str], shortest: int, longest: int | None) -> bool:
    """Whether these are one format whose own form in xgrammar holds the lengths too."""
    if len(formats) != 1 or formats[0] in _NOT_XGRAMMARS:
        return False
    least, most, _ = FORMATS[formats[0]]
    return shortest <= least and (longest is None or (most is not None and most <= longest))


def _matching(patterns: dict[str, Schema], formats: dict[str, Schema], shortest: int, longest: int | None) -> str:
    """Return a pattern of the texts that all of these hold for."""
    keyword, given = ("pattern", patterns) if patterns else ("format", formats)
    name, holder = list(given.items())[-1]
    wanted = [*patterns, *(FORMATS[one][2] for one in formats)]
    why = ValueError(f"no text without quotes, backslashes and control characters matches {' and '.join(wanted)[:120]}")
    try:
        if len(wanted) == 1:
            try:
                return whole_pattern(wanted[0], shortest, longest)
            except ValueError as error:
                why = error if patterns else why
        if (found := joint_pattern(wanted, shortest, longest)) is not None:
            return found
    except ValueError as error:
        raise UnsupportedError(holder, keyword, f"{keyword} {name[:60]}: {error}") from error
    if patterns and formats:  # by the specification a format is a note, and a pattern is none
        return _matching(patterns, {}, shortest, longest)
    if len(wanted) > 1:
        raise NothingError(str(why))
    raise UnsupportedError(holder, keyword, f"{keyword} {name[:60]}: {why}")


def _has_grid_number(low: float, high: float) -> bool:
    """Whether a number with six decimals, as xgrammar writes bounded ones, is between these."""
    return math.floor(Fraction(str(low)) * _GRID) + 1 < Fraction(str(high)) * _GRID
