"""The type notation of contract.yaml: `int >= 1 | null`, `list[str]`, `AUTO | CUTLASS`, `float 0..1`, `KvCacheConfig`.

A quoted number is no number: TensorRT-LLM's pydantic models would take "8" for 8, but a recipe that says so is refused
here as a likely mistake.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

_NAMES = {"null": "null", "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string"}
_TYPES: dict[str, Any] = {
    "null": type(None), "bool": bool, "int": int, "float": (int, float), "str": str, "dict": dict, "any": object,
    "object": (), "list": (list, tuple), "class": dict, "value": str,
}  # fmt: skip
_RANGE = re.compile(r"(int|float) (?:>= (\S+)|(\S+)\.\.(\S+))")  # bounds are inclusive
_CLASS = re.compile(r"[A-Z]\w+(Config|Args)")


@dataclass(frozen=True, slots=True)
class TypeAlternative:
    """One alternative of a type. Bounds are inclusive."""

    kind: str  # null bool int float str dict any object list class value
    low: float = -math.inf
    high: float = math.inf
    name: str = ""  # of a class, or the value itself
    item: FieldType | None = None  # of a list, or of a dict's values

    def takes(self, value: Any) -> bool:
        """A class takes any mapping, whose content its own fields check."""
        if not isinstance(value, _TYPES[self.kind]):
            return False
        if self.kind == "value":
            return bool(value == self.name)
        if self.kind in ("int", "float"):
            return not isinstance(value, bool) and self.low <= value <= self.high
        if self.item is None:
            return True
        return all(map(self.item.takes, value.values() if self.kind == "dict" else value))

    def describe(self) -> str:
        if self.kind == "value":
            return self.name
        if self.kind == "class":
            return f"a mapping ({self.name})"
        if self.kind in ("list", "dict"):
            whole = "a list" if self.kind == "list" else "a mapping"
            return f"{whole} of: {self.item.describe()}" if self.item else whole
        return _NAMES.get(self.kind, self.kind) + self._range()

    def _range(self) -> str:
        if self.low == -math.inf:
            return ""
        return f", {self.low:g} or more" if self.high == math.inf else f" from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class FieldType:
    """Alternatives, of which one must fit."""

    parts: tuple[TypeAlternative, ...]

    def takes(self, value: Any) -> bool:
        return any(part.takes(value) for part in self.parts)

    def is_out_of_range(self, value: Any) -> bool:
        """The number is of the right kind, and the bounds refuse it."""
        free = [replace(part, low=-math.inf, high=math.inf) for part in self.parts if part.kind in ("int", "float")]
        return not self.takes(value) and any(part.takes(value) for part in free)

    def describe(self) -> str:
        return " or ".join(part.describe() for part in self.parts)

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts if part.kind == "value")

    @property
    def words(self) -> tuple[str, ...]:
        """The values, and those of a list's items."""
        return (*self.values, *(word for part in self.parts if part.item for word in part.item.words))

    def without(self, values: Collection[str]) -> FieldType:
        """Nor lists of them."""
        kept = [part for part in self.parts if part.kind != "value" or part.name not in values]
        return FieldType(tuple(replace(part, item=part.item and part.item.without(values)) for part in kept))

    @property
    def class_name(self) -> str:
        """ "": no class."""
        return next((part.name for part in self.parts if part.kind == "class"), "")

    @property
    def is_writable(self) -> bool:
        return any(part.kind not in ("object", "null") for part in self.parts)


def parse_type(text: str) -> FieldType:
    """Raises ValueError."""
    return FieldType(tuple(_parse_part(part) for part in _split(text)))


def _split(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\|(?![^\[]*\])", text)]


def _parse_part(text: str) -> TypeAlternative:
    if match := re.fullmatch(r"(list|dict)\[(.+)\]", text):
        inner = match.group(2).removeprefix("str, ") if match.group(1) == "dict" else match.group(2)
        return TypeAlternative(match.group(1), item=parse_type(inner))
    if match := _RANGE.fullmatch(text):
        kind, least, low, high = match.groups()
        number = int if kind == "int" else float  # a float would round large bounds
        return TypeAlternative(kind, number(least or low), number(high) if high else math.inf)
    if text in ("null", "bool", "int", "float", "str", "dict", "any", "object"):
        return TypeAlternative(text)
    if _CLASS.fullmatch(text):
        return TypeAlternative("class", name=text)
    if not re.fullmatch(r"[\w-]+", text):
        raise ValueError(f"type {text!r} is not understood")
    return TypeAlternative("value", name=text)
