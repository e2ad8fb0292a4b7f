"""Values of command-line options: numbers within bounds, and lists as in 1,16,64 or bus,decode."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


def numbers(kind: type[Number]) -> Callable[[str], list[Number]]:
    def parse(text: str) -> list[Number]:
        try:
            return [kind(item) for item in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}; numbers with commas between them, as in 1,16") from error

    return parse


def chosen(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of names, all of `known`."""

    def parse(text: str) -> list[str]:
        items = text.split(",")
        if unknown := [item for item in items if item not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; known: {', '.join(known)}")
        return items

    return parse


def positive(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; more than 0")
    return value


def not_negative(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; 0 or more")
    return value


def share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text}; more than 0, 1 at most")
    return value


def count(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text}; 0 or more")
    return value


def positive_count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}; 1 or more")
    return value
