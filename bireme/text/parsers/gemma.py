"""Calls of Gemma 4 and FunctionGemma: a name and an object that is nearly JSON.

    <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Keys stand bare or in the format's own quotes, between which every character stands for itself. JSON is taken too, which
is what guided calls are made of: grammars know no strings with such quotes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.envelope import MAX_HEAD
from bireme.text.parsers.guides import call_tags, separated, structural_tag
from bireme.text.parsers.json_stream import JsonStream
from bireme.text.parsers.json_text import json_text
from bireme.text.parsers.scan import may_become, split
from bireme.text.parsers.stateful import StatefulParser

MAX_KEY = 256  # characters
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"<]+")


@dataclass(frozen=True)
class GemmaFormat:
    begin: str
    end: str
    quote: str
    needs_special_tokens: bool = True
    trigger: str = ""  # the guide's arguments are JSON, which is not what models are taught

    def parser(self, request: ParserRequest) -> Parser:
        return GemmaParser(self, request)

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        return structural_tag(
            separated(call_tags(functions, lambda name: f"{self.begin}call:{name}", self.end), "", is_parallel)
        )


class GemmaParser(StatefulParser):
    def __init__(self, form: GemmaFormat, request: ParserRequest) -> None:
        super().__init__(request)
        self._form = form
        self.begins = (form.begin,)
        self.ends = (form.end,)

    def _begin(self, marker: str, rest: str) -> str:
        self._raw = [marker]
        self._state = self._name
        return rest

    def _name(self, text: str) -> str:
        before, brace, _ = split(text[:MAX_HEAD], ("{",))
        if not brace and len(text) < MAX_HEAD:
            return self._hold(text)
        name = before.strip().removeprefix("call:").strip()
        if not brace or name not in self._names:
            self._give_up("")
            return text
        self._start_call(name)
        self._arguments = GemmaStream(self._form.quote)
        self._state = self._stream_arguments
        return text[len(before) :]


class GemmaStream(JsonStream):
    """Puts out JSON."""

    words = {"None": "null", "True": "true", "False": "false"}  # templates write what they don't know as Python does

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self._is_quoted = False  # the string at hand is between the format's own quotes
        self._written: dict[str, str] = {}  # the latest key as it was written, by its JSON

    @property
    def held(self) -> str:
        return "".join(self._written.get(text, text) for text in self._pending) + self._held

    def _take(self, text: str, at: int) -> int:
        if self._expects in ("key", "key or }"):
            if text.startswith(self._quote, at) or may_become(text[at:], self._quote):
                return self._take_key(text, at, text.find(self._quote, at + len(self._quote)), self._quote)
            if key := _BARE_KEY.match(text, at):
                return self._take_key(text, at, key.end() if key.end() < len(text) else -1, "")
        if self._expects in ("value", "value or ]"):
            if text.startswith(self._quote, at):
                self._is_quoted = True
                self._let_out('"', "string")
                return len(self._quote)
            if may_become(text[at:], self._quote):
                return 0
        return super()._take(text, at)

    def _take_key(self, text: str, at: int, end: int, quote: str) -> int:
        """Take a key up to `end` (-1: not seen yet), with its quotes."""
        if (len(text) if end < 0 else end) - at > MAX_KEY:
            self.is_broken = True
        if end < 0 or self.is_broken:
            return 0
        key, last = json_text(text[at + len(quote) : end]), end + len(quote)
        self._written = {key: text[at:last]}
        self._put_off(key, ":")
        return last - at

    def _take_string(self, text: str, at: int) -> int:
        if not self._is_quoted:
            return super()._take_string(text, at)
        before, quote, _ = split(text[at:], (self._quote,))
        if before:
            self._emit_string(json_text(before)[1:-1])
            return len(before)
        if not quote:
            return 0
        self._is_quoted = False
        self._end_string()
        return len(quote)
