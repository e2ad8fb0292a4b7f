"""Calls as a function and its parameters in tags, values as plain text: Qwen3-Coder, MiniMax, DeepSeek V3.2, GLM 4.5.

    <tool_call>                        <minimax:tool_call>
    <function=f>                       <invoke name="f">
    <parameter=city>                   <parameter name="city">Paris</parameter>
    Paris                              </invoke>
    </parameter>                       </minimax:tool_call>
    </function>
    </tool_call>                       <tool_call>f
                                       <arg_key>city</arg_key>
                                       <arg_value>Paris</arg_value>
                                       </tool_call>

A value's JSON type is what its tag says (string="true" of DeepSeek), else that of its parameter in the function's
schema (schema_types.py); a text that does not fit stays a string. Values that can only be strings stream as they come,
others come when they are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.envelope import MAX_HEAD
from bireme.text.parsers.guides import call_tags, parameters_of, separated, structural_tag
from bireme.text.parsers.json_text import json_text
from bireme.text.parsers.scan import may_become, skip_blanks, split
from bireme.text.parsers.schema_types import NOT_TEXT, TEXT, FunctionTypes
from bireme.text.parsers.stateful import StatefulParser


@dataclass(frozen=True)
class TaggedFormat:
    """An entry of the table. A tag's name that begins with a quote ends with one, and attributes may follow it."""

    section: tuple[str, str]  # around a call, or all of them
    function: tuple[
        str, str, str
    ]  # before and after a name, after its parameters; "": the section's markers stand there
    parameter: tuple[str, str, str]  # before and after a key, after its value
    style: str  # of xgrammar's json_schema format
    value: str = ""  # before a value
    is_padded: bool = False  # a value has a line break on each side
    is_shared: bool = True  # a section holds all calls
    needs_special_tokens: bool = True

    def parser(self, request: ParserRequest) -> Parser:
        return TaggedParser(self, request)

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        (first, last), (begin, name_end, end) = self.section, self.function
        if not begin:
            return structural_tag(
                separated(call_tags(functions, lambda name: first + name, last, self.style), "", is_parallel)
            )
        if not self.is_shared:
            tags = call_tags(
                functions, lambda name: f"{first}\n{begin}{name}{name_end}\n", f"\n{end}\n{last}", self.style
            )
            return structural_tag(separated(tags, "\n", is_parallel))
        tags = call_tags(functions, lambda name: f"{begin}{name}{name_end}\n", f"\n{end}\n", self.style)
        return structural_tag(f"{first}\n", separated(tags, "", is_parallel), last)


class TaggedParser(StatefulParser):
    def __init__(self, form: TaggedFormat, request: ParserRequest) -> None:
        super().__init__(request)
        self._form = form
        self.begins = tuple(filter(None, (form.section[0], form.function[0])))  # the outer one is sometimes left out
        self._function_end = form.function[2] or form.section[1]
        self._types = FunctionTypes({})
        self._key = ""
        self._type = TEXT  # of the value at hand
        self._keys: set[str] = set()
        self._value: list[str] = []
        self._is_streamed = False  # the value at hand is a string: it comes out as it is taken
        self._is_value_start = False

    def _begin(self, marker: str, rest: str) -> str:
        self._raw = [marker]
        self._state = self._function_name if marker == (self._form.function[0] or marker) else self._function
        return rest

    def _function(self, text: str) -> str:
        return self._expect(text, self._form.function[0], self._function_name)

    def _function_name(self, text: str) -> str:
        form = self._form
        ends = (form.function[1],) if form.function[0] else ("\n", form.parameter[0], form.section[1])
        name, end, _ = split(text[:MAX_HEAD], ends)
        if not end and len(text) < MAX_HEAD:
            self._held = text
            return ""
        if not end or name.strip() not in self._names:
            self._give_up("")
            return text
        self._start_call(name.strip())
        self._types = FunctionTypes(parameters_of(self._functions[name.strip()]))
        self._keys = set()
        self._state = self._parameter
        return text[len(name) + (len(end) if form.function[0] else 0) :]

    def _parameter(self, text: str) -> str:
        start = skip_blanks(text)
        marks = (self._form.parameter[0], self._function_end)
        if start is not None and (not start or any(may_become(start, mark) for mark in marks)):
            self._held = text
            return ""
        if start is not None and start.startswith(marks[0]):
            self._state = self._parameter_name
            return start[len(marks[0]) :]
        self._close_arguments()
        if start is not None and start.startswith(marks[1]):
            self._state = self._call_end
            return start[len(marks[1]) :]
        self._finish_call()
        return text

    def _parameter_name(self, text: str) -> str:
        begin, name_end, _ = self._form.parameter
        header, end, _ = split(text[:MAX_HEAD], (name_end,))
        if not end and len(text) < MAX_HEAD:
            self._held = text
            return ""
        name, _, attributes = header.partition('"') if begin.endswith('"') else (header, "", "")
        if not end or name.strip() in self._keys:
            self._break_call(begin)
            return text
        self._key, self._raw = name.strip(), [begin + header + end]
        if 'string="true"' in attributes:
            self._type = TEXT
        elif 'string="false"' in attributes:
            self._type = NOT_TEXT
        else:
            self._type = self._types.of(self._key)
        self._state = self._value_begin
        return text[len(header) + len(end) :]

    def _value_begin(self, text: str) -> str:
        begin = self._form.value
        start = skip_blanks(text) if begin else text
        if begin and start is not None and (not start or may_become(start, begin)):
            self._held = text
            return ""
        if start is None or not start.startswith(begin):
            self._break_call("".join(self._raw))
            return text
        self._raw, self._value, self._is_value_start = [], [], True
        self._is_streamed = self._type.is_text
        if self._is_streamed:
            self._add(self._key_json() + '"')
        self._state = self._parameter_value
        return start[len(begin) :]

    def _parameter_value(self, text: str) -> str:
        before, end, rest = split(text, (self._form.parameter[2],))
        if not end and self._form.is_padded and before.endswith("\n"):
            before, rest = before[:-1], "\n" + rest  # it may be the line break before the end
        self._take_value(before, bool(end))
        if not end:
            self._held = rest
            return ""
        self._end_value()
        self._state = self._parameter
        return rest

    def _take_value(self, text: str, is_last: bool) -> None:
        if self._form.is_padded and text:
            text = text.removeprefix("\n") if self._is_value_start else text
            self._is_value_start = False
        if self._form.is_padded and is_last:
            text = text.removesuffix("\n")
        if self._is_streamed:
            self._add(json_text(text)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        self._add('"' if self._is_streamed else self._key_json() + self._type.as_json("".join(self._value)))
        self._keys.add(self._key)

    def _key_json(self) -> str:
        return f"{', ' if self._keys else '{'}{json_text(self._key)}: "

    def _close_arguments(self) -> None:
        self._add("}" if self._keys else "{}")

    def _break_call(self, text: str) -> None:
        """End a call whose tags are no more right: its own text is content again."""
        self._close_arguments()
        self._finish_call()
        self._say(text)

    def _call_end(self, text: str) -> str:
        start, end = skip_blanks(text), self._form.section[1]
        if self._form.function[0] and start is not None and (not start or may_become(start, end)):
            self._held = text
            return ""
        self._finish_call()
        is_end = self._form.function[0] and start is not None and start.startswith(end)
        return start[len(end) :] if is_end and start else text

    def _end(self, is_cut: bool) -> None:
        if self._state == self._parameter_value:
            self._take_value(self._held, not is_cut)
            self._held = ""
            if not (is_cut and self._is_streamed):
                self._end_value()
        if self._state in (self._parameter, self._parameter_name, self._value_begin, self._parameter_value):
            left = "".join(self._raw) if self._state == self._value_begin else ""
            left = self._form.parameter[0] if self._state == self._parameter_name else left
            left = (left + self._held).strip()
            if not is_cut:
                self._close_arguments()
            self._finish_call()
            self._say("" if is_cut else left)
        elif self._state == self._call_end:
            self._finish_call()
            self._say(self._held.strip())
        else:
            super()._end(is_cut)
