"""Values of command-line options that are lists: 1,16,64 or bus,decode."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


def numbers(kind: type[Number]) -> Callable[[str], list[Number]]:
    return lambda text: [kind(item) for item in text.split(",")]


def chosen(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of names, all of `known`."""

    def parse(text: str) -> list[str]:
        items = text.split(",")
        if unknown := [item for item in items if item not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; known: {', '.join(known)}")
        return items

    return parse
