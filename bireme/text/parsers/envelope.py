"""Calls as JSON objects with a name in them: between markers, bare, or in a list.

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    {"name": "f", "parameters": {...}}; {"name": ...}
    [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]
    <TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>

The arguments stream where the name comes first, as models are taught; else a call comes whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.guides import call_tags, separated, structural_tag
from bireme.text.parsers.json_stream import JsonStream
from bireme.text.parsers.json_text import json_text
from bireme.text.parsers.scan import skip_blanks, take_mark
from bireme.text.parsers.stateful import StatefulParser

MAX_HEAD = 512  # characters in which the name must have come for its arguments to stream
_BLANKS = r"[ \t\r\n]*"  # JSON's own, as JsonStream takes them: a head that came at once must not be read otherwise
_HEAD = re.compile(
    r'~\{~(?:"type"~:~"function"~,~|"tool_call_id"~:~"[\w.-]{0,64}"~,~)?"(?:tool_)?name"~:~"([\w.:/-]{1,128})"~,~"(?:arguments|parameters)"~:~(?=\{)'.replace(
        "~", _BLANKS
    )
)
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class EnvelopeFormat:
    """An entry of the table."""

    begins: tuple[str, ...]  # markers before a call, or before the list of them
    end: str = ""  # after each call, or after the list of them
    opener: str = ""  # after the marker: a list follows
    separator: str = "\n"
    name_key: str = "name"
    argument_key: str = "arguments"
    is_bare: bool = False  # an answer that begins with { is a call, without any marker
    layout: str = ""  # white space between marker and JSON, or list, as the model is taught
    needs_special_tokens: bool = False
    is_taught: bool = True  # `guide` has the layout that models are taught

    def parser(self, request: ParserRequest) -> Parser:
        return EnvelopeParser(self, request)

    @property
    def trigger(self) -> str:
        return "" if not self.is_taught or (self.is_bare and not self.end) else self.begins[0]

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        begin = "" if self.opener or (self.is_bare and not self.end) else self.begins[0] + self.layout
        tags = call_tags(
            functions,
            lambda name: f'{begin}{{"{self.name_key}": {json.dumps(name)}, "{self.argument_key}": ',
            "}" + (self.layout + self.end if self.end and not self.opener else ""),
        )
        calls = separated(tags, self.separator, is_parallel)
        if not self.opener:
            return structural_tag(calls)
        return structural_tag(self.begins[0] + self.layout + self.opener, calls, "]" + self.end)


class EnvelopeParser(StatefulParser):
    def __init__(self, form: EnvelopeFormat, request: ParserRequest) -> None:
        super().__init__(request)
        self._form = form
        self.begins = form.begins
        self.ends = (form.end,) if form.end else ()
        self._is_listed = False  # inside [ ... ]
        self._has_marker = False
        self._outline, self._num_outlined = JsonStream(), 0
        if form.is_bare:
            self._state = self._answer_start

    def _answer_start(self, text: str) -> str:
        start = skip_blanks(text)
        if start == "":
            return self._hold(text)
        if start and start.startswith("{"):
            self._raw, self._has_marker = [text[: len(text) - len(start)]], False
            self._enter_head()
            return start
        self._state = self._content
        return text

    def _begin(self, marker: str, rest: str) -> str:
        self._has_marker = True
        self._raw = [marker]
        if self._form.opener:
            self._state = self._open_list
        else:
            self._enter_head()
        return rest

    def _open_list(self, text: str) -> str:
        start = skip_blanks(text)
        if start == "":
            return self._hold(text)
        self._is_listed = bool(start and start.startswith(self._form.opener))
        if start is None or not (self._is_listed or start.startswith("{")):
            return self._without_list(text)
        if self._is_listed:
            self._raw.append(text[: text.index(self._form.opener) + 1])
            text = start[1:]
        self._enter_head()
        return text

    def _without_list(self, text: str) -> str:
        self._give_up("")
        return text

    def _enter_head(self) -> None:
        self._state = self._head
        self._outline, self._num_outlined = JsonStream(), 0

    def _head(self, text: str) -> str:
        """Find the name; if it does not come early, take the whole object."""
        match = _HEAD.match(text, 0, MAX_HEAD)
        if match is not None and match.group(1) in self._names:
            self._start_call(match.group(1))
            self._state = self._stream_arguments
            return text[match.end() :]
        outline = self._outline
        outline.feed(text[self._num_outlined : MAX_HEAD])
        self._num_outlined = len(text)
        if match is None and len(text) < MAX_HEAD and not outline.is_done and not outline.is_broken:
            return self._hold(text)
        self._outline = JsonStream()
        self._state = self._whole
        return text

    def _whole(self, text: str) -> str:
        _, rest = self._outline.feed(text)
        self._raw.append(text)
        if not self._outline.is_done and not self._outline.is_broken:
            return ""
        before = 1 if self._has_marker or self._is_listed else 0
        taken = "".join(self._raw[before:])
        taken = taken[: len(taken) - len(rest)]  # the rest may begin in an earlier piece
        call = self._read(taken) if self._outline.is_done else None
        if call is None:
            self._raw[before:] = [taken]
            self._give_up("")
        else:
            self._start_call(call[0])
            self._add(call[1])
            self._state = self._after_call
        return rest

    def _read(self, text: str) -> tuple[str, str] | None:
        """Return name and arguments of a whole call; None: it is none."""
        try:
            tree: Any = json.loads(text[text.index("{") :], strict=False)
            arguments: Any = next((tree[key] for key in _ARGUMENTS if key in tree), {})
            if isinstance(arguments, str):
                arguments = json.loads(arguments, strict=False)
            name = tree.get("name", tree.get("tool_name"))
            if not isinstance(arguments, dict) or not isinstance(name, str):
                return None
            return (name, json_text(arguments)) if name in self._names else None
        except (ValueError, RecursionError):
            return None

    def _after_arguments(self, text: str) -> str:
        self._outline = JsonStream(is_open=True)
        self._state = self._tail
        return text

    def _tail(self, text: str) -> str:
        _, rest = self._outline.feed(text)
        if self._outline.is_done:
            self._state = self._after_call
        elif self._outline.is_broken:
            self._finish_call()
        return rest

    def _after_call(self, text: str) -> str:
        found = take_mark(text, tuple(filter(None, (self._form.end, *self._continues))))
        if found is None:
            return self._hold(text)
        end, rest = found
        if end:
            return self._pass_end(end, rest)
        self._finish_call()
        self._is_listed = False
        return text

    @property
    def _continues(self) -> tuple[str, ...]:
        if self._is_listed:
            return (",", "]")
        return (";",) if self._form.is_bare and not self._has_marker else ()

    def _pass_end(self, end: str, rest: str) -> str:
        if end in (",", ";"):
            return self._enter_next(end, rest)
        self._is_listed = False
        if end != "]" or not self._form.end:
            self._finish_call()
        return rest

    def _enter_next(self, end: str, rest: str) -> str:
        self._has_marker = False
        start = skip_blanks(rest)
        if start and start.startswith("{"):
            self._raw = [end] if self._is_listed else []
            self._enter_head()
            return start
        if start == "":
            return self._hold(end + rest)
        self._finish_call()
        self._is_listed = False
        return end + rest

    def _end(self, is_cut: bool) -> None:
        if self._state in (self._tail, self._after_call):
            self._held = "" if self._held.strip() in (",", ";") else self._held
            self._finish_call()
            super()._end(is_cut)
        elif self._state == self._answer_start:
            self._say(self._held)
        else:
            super()._end(is_cut)
