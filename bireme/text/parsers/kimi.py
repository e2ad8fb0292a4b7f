"""Calls of Kimi K3: elements with attributes, values as plain text; or all arguments as one JSON text.

    <|open|>tools<|sep|>
    <|open|>call tool="f" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>
    <|close|>call<|sep|>
    <|open|>call tool="f" index="2"<|sep|><|open|>json type="object"<|sep|>{...}<|close|>json<|sep|><|close|>call<|sep|>
    <|close|>tools<|sep|><|close|>message<|sep|>

(Nothing stands between the elements.) Calls follow the answer's own element, which reasoning_parser kimi_k3 takes away.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.guides import call_tags, separated, structural_tag
from bireme.text.parsers.scan import may_become, skip_blanks
from bireme.text.parsers.tagged import TaggedFormat, TaggedParser

_HEADER = re.compile(r'([^"]+)"(?: index="[0-9]{1,9}")?')
_JSON = ('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>")
_MESSAGE_END = "<|close|>message<|sep|>"
_RESPONSE_END = "<|close|>response<|sep|>"


@dataclass(frozen=True)
class KimiFormat(TaggedFormat):
    """An entry of the table."""

    trigger = ""  # the answer's element ends before the section begins, by marks of several tokens

    def parser(self, request: ParserRequest) -> Parser:
        return KimiParser(self, request)

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        """It holds within the answer's element, which the prompt or the reasoning's end has opened."""
        (first, last), (begin, name_end, end) = self.section, self.function
        tags = call_tags(functions, lambda name: f'{begin}{name}" index="', end, self.style)
        for tag in tags:
            number = {"type": "regex", "pattern": "[0-9]{1,3}"}
            elements = [number, {"type": "const_string", "value": f'"{name_end}'}, tag["content"]]
            tag["content"] = {"type": "sequence", "elements": elements}
        return structural_tag(_RESPONSE_END + first, separated(tags, "", is_parallel), last)


class KimiParser(TaggedParser):
    def __init__(self, form: KimiFormat, request: ParserRequest) -> None:
        super().__init__(form, request)
        self._section_ends += (_MESSAGE_END,)
        self.ends += (_MESSAGE_END, _JSON[1])

    def _function_of(self, header: str) -> str:
        match = _HEADER.fullmatch(header)
        return match.group(1) if match else ""

    def _written(self, key: str) -> str:
        return key.replace("&", "&amp;").replace('"', "&quot;")

    def _key_of(self, written: str) -> str:
        return written.replace("&quot;", '"').replace("&amp;", "&")

    def _parameter(self, text: str) -> str:
        start = None if self._is_started else skip_blanks(text)
        if start and may_become(start, _JSON[0]):
            return self._hold(text)
        if start and start.startswith(_JSON[0]):
            taken = len(text) - len(start) + len(_JSON[0])
            self._await_arguments(self._name, text[:taken])
            return text[taken:]
        return super()._parameter(text)
