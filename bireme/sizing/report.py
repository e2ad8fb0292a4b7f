"""A report as one HTML file that needs no other: sentences, pictures, tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    sentences: Sequence[str] = ()
    picture: str = ""  # an <svg> of our own making
    picture_says: str = ""  # to who can't see it
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    lead: Sequence[str]
    sections: Sequence[Section] = field(default_factory=tuple)


def render(page: Page) -> str:
    """Return the HTML. All text is escaped, pictures are not."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(page=page)
