"""Calls with the name before the JSON: deepseek_v3.1, and mistral since its v11 tokenizer.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
[TOOL_CALLS]f[ARGS]{...}        [TOOL_CALLS]f{...}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.envelope import MAX_HEAD, EnvelopeFormat, EnvelopeParser
from bireme.text.parsers.guides import call_tags, separated, structural_tag
from bireme.text.parsers.scan import may_become, skip_blanks, split
from bireme.text.parsers.stateful import StatefulParser

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@dataclass(frozen=True)
class DeepSeekFormat:
    needs_special_tokens: bool = True

    def parser(self, request: ParserRequest) -> Parser:
        return DeepSeekParser(request)

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        tags = call_tags(functions, lambda name: _CALL + name + _SEPARATOR, _CALL_END)
        return structural_tag(_CALLS, separated(tags, "", is_parallel), _CALLS_END)


class DeepSeekParser(StatefulParser):
    begins = (_CALLS, _CALL)

    def _begin(self, marker: str, rest: str) -> str:
        self._raw = [marker]
        self._state = self._name if marker == _CALL else self._first_call
        return rest

    def _first_call(self, text: str) -> str:
        start = skip_blanks(text)
        if start is not None and (not start or may_become(start, _CALL)):
            self._held = text
            return ""
        if start is None or not start.startswith(_CALL):
            self._give_up("")
            return text
        self._raw.append(text[: len(text) - len(start)] + _CALL)
        self._state = self._name
        return start[len(_CALL) :]

    def _name(self, text: str) -> str:
        name, separator, _ = split(text[:MAX_HEAD], (_SEPARATOR,))
        if not separator and len(text) < MAX_HEAD:
            self._held = text
            return ""
        if not separator or name.strip() not in self._names:
            self._give_up("")
            return text
        header = name + separator
        self._await_arguments(name.strip(), header)
        return text[len(header) :]

    def _after_arguments(self, text: str) -> str:
        start = skip_blanks(text)
        marks = (_CALL_END, _CALL, _CALLS_END)
        if start is not None and (not start or any(may_become(start, mark) for mark in marks)):
            self._held = text
            return ""
        if start is not None and start.startswith(_CALL_END):
            return start[len(_CALL_END) :]
        self._finish_call()
        if start is not None and start.startswith(_CALLS_END):
            return start[len(_CALLS_END) :]
        return text

    def _end(self, is_cut: bool) -> None:
        if self._state == self._after_arguments:
            self._finish_call()
            self._say(self._held.strip())
        else:
            super()._end(is_cut)


@dataclass(frozen=True)
class MistralFormat(EnvelopeFormat):
    """A list of JSON objects, or name and arguments."""

    def parser(self, request: ParserRequest) -> Parser:
        return MistralParser(self, request)


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
            self._held = text
            return ""
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
