"""The parser of an answer without markers: everything is content."""

from __future__ import annotations

from bireme.text.parsers.base import Content, Event


class PlainParser:
    is_reasoning = False
    begins = ()

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def close(self, is_cut: bool = False) -> list[Event]:
        return []
