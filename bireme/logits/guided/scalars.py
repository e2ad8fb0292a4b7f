"""Numbers and texts that satisfy several schemas at once, in the words that xgrammar enforces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

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
FORMATS: dict[
    str, tuple[int, int | None, str]
] = {  # shortest, longest, and a plainer pattern for what stands beside it
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


class _Bounds(NamedTuple):
    """None: there is none. Open: the bound itself is out."""

    low: float | None
    is_low_open: bool
    high: float | None
    is_high_open: bool

    @classmethod
    def of(cls, flats: Sequence[Schema]) -> _Bounds:
        low = max(
            [(flat["minimum"], False) for flat in flats if "minimum" in flat]
            + [(flat["exclusiveMinimum"], True) for flat in flats if "exclusiveMinimum" in flat],
            default=(None, False),
        )
        high = min(
            [(flat["maximum"], False) for flat in flats if "maximum" in flat]
            + [(flat["exclusiveMaximum"], True) for flat in flats if "exclusiveMaximum" in flat],
            key=lambda bound: (bound[0], not bound[1]),
            default=(None, False),
        )
        return cls(*low, *high)

    @property
    def first(self) -> int | None:
        """The least integer within."""
        if self.low is None:
            return None
        return math.floor(self.low) + 1 if self.is_low_open else math.ceil(self.low)

    @property
    def last(self) -> int | None:
        if self.high is None:
            return None
        return math.ceil(self.high) - 1 if self.is_high_open else math.floor(self.high)


def number(name: str, flats: Sequence[Schema]) -> Schema:
    bounds, holder = _Bounds.of(flats), next((flat for flat in flats if "multipleOf" in flat), {})
    parts = [Fraction(str(flat["multipleOf"])) for flat in flats if "multipleOf" in flat]
    if name == "number" and any(part.denominator > 1 for part in parts):
        raise UnsupportedError(
            holder, "multipleOf", "multipleOf of a fraction can't be enforced; leave it out, or send integers"
        )
    if name == "number" and not parts:
        return _real(bounds, flats)
    return _integer(bounds, math.lcm(*(part.numerator for part in parts)), holder, flats)


def _real(bounds: _Bounds, flats: Sequence[Schema]) -> Schema:
    low, high = bounds.low, bounds.high
    if low is not None and high is not None:
        if low > high or (low == high and (bounds.is_low_open or bounds.is_high_open)):
            raise NothingError(f"no number is within {low} and {high}")
        if low == high:
            return {"enum": [low]}
        if not _has_grid_number(low, high):
            holder, word = next((flat, word) for flat in flats for word in NUMBER_KEYWORDS if word in flat)
            raise UnsupportedError(
                holder, word, f"numbers between {low} and {high} can't be enforced: six decimals are; send wider bounds"
            )
    shape: Schema = {"type": "number"}
    if low is not None:
        shape["exclusiveMinimum" if bounds.is_low_open else "minimum"] = low
    if high is not None:
        shape["exclusiveMaximum" if bounds.is_high_open else "maximum"] = high
    return shape


def _integer(bounds: _Bounds, step: int, holder: Schema, flats: Sequence[Schema]) -> Schema:
    first, last = bounds.first, bounds.last
    shape: Schema = {"type": "integer"}
    for name, bound in (("minimum", first), ("maximum", last)):
        if bound is not None:
            _check_integer(name, bound, flats)
            shape[name] = bound
    if first is not None and last is not None and first > last:
        raise NothingError(f"no integer is within {first} and {last}")
    if step == 1:
        return shape
    if first is not None and last is not None and -(-first // step) * step > last:
        raise NothingError(f"no multiple of {step} is within {first} and {last}")
    is_free = first is None and last is None and step <= _MAX_MULTIPLE
    if is_free or (first is not None and last is not None and last - first < _MAX_MULTIPLE_WIDTH):
        return {**shape, "multipleOf": step}
    raise UnsupportedError(
        holder, "multipleOf", f"multipleOf {step} can't be enforced here: up to {_MAX_MULTIPLE} without minimum and"
        f" maximum, or with both and at most {_MAX_MULTIPLE_WIDTH} integers between them",
    )  # fmt: skip


def _check_integer(name: str, bound: int, flats: Sequence[Schema]) -> None:
    if abs(bound) > MAX_INTEGER:
        words = (name, f"exclusive{name.title()}")
        holder, word = next((flat, word) for flat in flats for word in words if word in flat)
        raise UnsupportedError(holder, word, f"{word}: {bound}; integers of 64 bits are enforced")


def string(flats: Sequence[Schema]) -> Schema:
    shortest = max((math.ceil(flat.get("minLength", 0)) for flat in flats), default=0)
    longest = min((math.floor(flat["maxLength"]) for flat in flats if "maxLength" in flat), default=None)
    patterns = {flat["pattern"]: flat for flat in flats if "pattern" in flat}
    formats = {flat["format"]: flat for flat in flats if flat.get("format") in FORMATS}
    if longest is not None and shortest > longest:
        raise NothingError(f"no text has {shortest} to {longest} characters")
    if len(formats) == 1 and not patterns:
        return _formatted(next(iter(formats)), formats, shortest, longest)
    if patterns or formats:
        return {"type": "string", "pattern": _matching(patterns, formats, shortest, longest)}
    shape: Schema = {"type": "string"}
    if shortest:
        shape["minLength"] = shortest
    if longest is not None:
        shape["maxLength"] = longest
    return shape


def _formatted(name: str, holders: dict[str, Schema], shortest: int, longest: int | None) -> Schema:
    least, most, _ = FORMATS[name]
    is_implied = shortest <= least and (longest is None or (most is not None and most <= longest))
    if is_implied and name not in _NOT_XGRAMMARS:
        return {"type": "string", "format": name}
    return {"type": "string", "pattern": _matching({}, holders, shortest, longest)}


def _matching(patterns: dict[str, Schema], formats: dict[str, Schema], shortest: int, longest: int | None) -> str:
    """Return a pattern of the texts that all of these hold for, each given with who says it."""
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
