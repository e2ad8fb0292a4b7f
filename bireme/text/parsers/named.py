"""Calls with the name before the JSON: DeepSeek V3 and V3.1, Kimi K2, and mistral since its v11 tokenizer.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
[TOOL_CALLS]f[ARGS]{...}        [TOOL_CALLS]f{...}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.envelope import MAX_HEAD, EnvelopeFormat, EnvelopeParser
from bireme.text.parsers.guides import call_tags, separated, structural_tag
from bireme.text.parsers.scan import may_become, split, take_mark
from bireme.text.parsers.stateful import StatefulParser

_MISTRAL_MARKS = {"type": "regex", "pattern": r"(\[CALL_ID\][0-9A-Za-z]{1,32})?(\[ARGS\])?"}
_NUMBER = re.compile(r":[0-9]{1,9}\Z")


@dataclass(frozen=True)
class NamedFormat:
    """An entry of the table."""

    section: tuple[str, str]  # around all calls
    call: tuple[str, str]  # around one call
    separator: str  # between name and arguments
    fence: tuple[str, str] = ("", "")  # around the arguments
    between: str = ""  # calls, as the model is taught
    name_prefix: str = ""  # may stand before the name
    is_numbered: bool = False  # a colon and the call's number may follow the name
    needs_special_tokens: bool = True

    def parser(self, request: ParserRequest) -> Parser:
        return NamedParser(self, request)

    @property
    def trigger(self) -> str:
        return self.section[0]

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        before = self.separator + self.fence[0]
        tags = call_tags(
            functions,
            lambda name: self.call[0] + self.name_prefix + name + (":" if self.is_numbered else before),
            self.fence[1] + self.call[1],
        )
        for tag in tags if self.is_numbered else ():
            number = {"type": "regex", "pattern": "[0-9]{1,3}"}
            elements = [number, {"type": "const_string", "value": before}, tag["content"]]
            tag["content"] = {"type": "sequence", "elements": elements}
        return structural_tag(self.section[0], separated(tags, self.between, is_parallel), self.section[1])


class NamedParser(StatefulParser):
    def __init__(self, form: NamedFormat, request: ParserRequest) -> None:
        super().__init__(request)
        self._form = form
        self.begins = (form.section[0], form.call[0])
        self.ends = (form.call[1], form.section[1])

    def _begin(self, marker: str, rest: str) -> str:
        self._raw = [marker]
        self._state = self._name if marker == self._form.call[0] else self._first_call
        return rest

    def _first_call(self, text: str) -> str:
        return self._expect(text, self._form.call[0], self._name)

    def _name(self, text: str) -> str:
        before, separator, _ = split(text[:MAX_HEAD], (self._form.separator,))
        if not separator and len(text) < MAX_HEAD:
            return self._hold(text)
        name = before.strip()
        if name not in self._names:
            name = name.removeprefix(self._form.name_prefix)
            name = _NUMBER.sub("", name) if self._form.is_numbered else name
        if not separator or name not in self._names:
            self._give_up("")
            return text
        header = before + separator
        if self._form.fence[0]:
            self._name_at_hand = name
            self._raw.append(header)
            self._state = self._fence
        else:
            self._await_arguments(name, header)
        return text[len(header) :]

    def _fence(self, text: str) -> str:
        fence = self._form.fence[0]
        if may_become(text, fence):
            return self._hold(text)
        taken = fence if text.startswith(fence) else ""
        self._await_arguments(self._name_at_hand, taken)
        return text[len(taken) :]

    def _after_arguments(self, text: str) -> str:
        (begin, end), section_end, fence_end = self._form.call, self._form.section[1], self._form.fence[1].strip()
        found = take_mark(text, tuple(filter(None, (fence_end, end, begin, section_end))))
        if found is None:
            return self._hold(text)
        mark, rest = found
        if mark and mark in (fence_end, end):
            return rest
        self._finish_call()
        return rest if mark == section_end else text

    def _end(self, is_cut: bool) -> None:
        if self._state == self._after_arguments:
            self._finish_call()
        super()._end(is_cut)


@dataclass(frozen=True)
class MistralFormat(EnvelopeFormat):
    """A list of JSON objects, or name and arguments."""

    def parser(self, request: ParserRequest) -> Parser:
        return MistralParser(self, request)

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        """A list, or names and arguments: which one a model is taught depends on its age."""
        listed = super().guide(functions, is_parallel)["structural_tag"]["format"]
        tags = call_tags(functions, lambda name: self.begins[0] + name, "")
        for tag in tags:
            tag["content"] = {"type": "sequence", "elements": [_MISTRAL_MARKS, tag["content"]]}
        return structural_tag({"type": "or", "elements": [listed, separated(tags, "", is_parallel)]})


class MistralParser(EnvelopeParser):
    _is_named = False

    def _begin(self, marker: str, rest: str) -> str:
        self._is_named = False
        return super()._begin(marker, rest)

    def _without_list(self, text: str) -> str:
        self._state = self._name
        return text

    def _name(self, text: str) -> str:
        before, separator, _ = split(text[:MAX_HEAD], ("[ARGS]", "{"))
        if not separator and len(text) < MAX_HEAD:
            return self._hold(text)
        name = before.partition("[CALL_ID]")[0].strip()
        if not separator or name not in self._names:
            self._give_up("")
            return text
        header = before + ("" if separator == "{" else separator)
        self._is_named = True
        self._await_arguments(name, header)
        return text[len(header) :]

    def _after_arguments(self, text: str) -> str:
        if not self._is_named:
            return super()._after_arguments(text)
        self._is_named = False
        self._finish_call()
        return text
