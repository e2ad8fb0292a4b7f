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

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bireme.errors import RequestError
from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.envelope import MAX_HEAD
from bireme.text.parsers.guides import call_tags, parameters_of, separated, structural_tag
from bireme.text.parsers.json_text import json_text
from bireme.text.parsers.scan import may_become, skip_blanks, split
from bireme.text.parsers.schema_types import NOT_TEXT, TEXT, FunctionTypes, ValueType
from bireme.text.parsers.stateful import StatefulParser
from bireme.text.parsers.tag_ends import PENDING, ValueEnds, begins_with, goes_on, tag_length

_KEY = re.compile(r"[\w.$-]+")  # of a parameter that the schema does not name


@dataclass(frozen=True)
class TaggedFormat:
    """An entry of the table. A tag's name that begins with a quote ends with one, and attributes may follow it."""

    section: tuple[str, str]  # around a call, or all of them, as the model is taught
    function: tuple[
        str, str, str
    ]  # before and after a name, after its parameters; "": the section's markers stand there
    parameter: tuple[str, str, str]  # before and after a key, after its value
    style: str  # of xgrammar's json_schema format; "": it has none
    value: str = ""  # before a value
    is_padded: bool = False  # a value has a line break on each side
    is_shared: bool = True  # a section holds all calls
    other_section: tuple[str, str] = ("", "")  # that is read too
    type_marks: tuple[str, str] = ("", "")  # attributes of a value: it is a string, it is none
    needs_special_tokens: bool = True

    def parser(self, request: ParserRequest) -> Parser:
        return TaggedParser(self, request)

    @property
    def trigger(self) -> str:
        return self.section[0] if self.style else ""

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        if not self.style:
            raise RequestError(
                "tool_choice: the model's tags can't be enforced by a grammar; send auto or none instead"
            )
        (first, last), (begin, name_end, end) = self.section, self.function
        if not begin:
            return structural_tag(
                separated(call_tags(functions, lambda name: first + name, last, self.style), "", is_parallel)
            )
        if not self.is_shared:
            tags = call_tags(
                functions, lambda name: f"{first}\n{begin}{name}{name_end}\n", _ends(f"{end}\n{last}"), self.style
            )
            return structural_tag(separated(tags, "\n", is_parallel))
        tags = call_tags(functions, lambda name: f"{begin}{name}{name_end}\n", _ends(f"{end}\n"), self.style)
        return structural_tag(f"{first}\n", separated(tags, "", is_parallel), last)


def _ends(end: str) -> list[str]:
    """A line break stands behind the last parameter; where there is none, the one behind the name is before the end."""
    return [f"\n{end}", end]


class TaggedParser(StatefulParser):
    def __init__(self, form: TaggedFormat, request: ParserRequest) -> None:
        super().__init__(request)
        self._form = form
        outer = tuple(filter(None, (form.section[0], form.other_section[0])))
        self.begins = outer + tuple(filter(None, (form.function[0],)))  # the outer one is sometimes left out
        self._section_ends = tuple(filter(None, (form.section[1], form.other_section[1])))
        self.ends = tuple(filter(None, (form.function[2],))) + self._section_ends
        self._over = (*self.ends, *self.begins)  # may stand behind the last value
        self._value_ends = ValueEnds(form.parameter[2], (form.parameter[0], *self._over), 2 if form.is_padded else 1)
        self._name = ""
        self._is_started = False  # a parameter or an end has come: it is a call
        self._types = FunctionTypes({})
        self._openings: dict[str, str] = {}  # of the function's parameters that have not come yet, by key
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
            return self._hold(text)
        function = self._function_of(name)
        if not end or function not in self._names:
            self._give_up("")
            return text
        self._name, self._is_started = function, False
        self._types = FunctionTypes(parameters_of(self._functions[self._name]))
        begin, name_end, _ = form.parameter
        key_end = '"' if begin.endswith('"') else name_end
        self._openings = {key: begin + self._written(key) + key_end for key in self._types.keys()}
        self._keys = set()
        self._state = self._parameter
        taken = len(name) + (len(end) if form.function[0] else 0)
        self._raw.append(text[:taken])
        return text[taken:]

    def _function_of(self, header: str) -> str:
        """Return the function's name; what stands between its marks is its header."""
        return header.strip()

    def _written(self, key: str) -> str:
        """Return a key as it stands in a tag."""
        return key

    def _key_of(self, written: str) -> str:
        return written

    def _opens_parameter(self, start: str) -> int:
        """Return 1 if a parameter begins here, PENDING if one may, else 0."""
        return begins_with(start, (self._form.parameter[0],), is_last=False)

    def _parameter(self, text: str) -> str:
        """Between values: take the next parameter's beginning, or the end of the call."""
        start, begin = skip_blanks(text), self._form.parameter[0]
        if start is None:
            return self._no_parameter(text)
        opens = self._opens_parameter(start)
        if opens == 1:
            self._raw.append(text[: len(text) - len(start)] + begin)
            self._state = self._parameter_name
            return start[len(begin) :]
        answer = opens or begins_with(start, self.begins, is_last=False) or self._end_length(start)
        if answer == PENDING:
            return self._hold(text)
        if answer == 0 or start.startswith(self.begins):
            return self._no_parameter(text)
        self._start()
        self._close_arguments()
        self._finish_call()
        return start[answer:]

    def _end_length(self, start: str) -> int:
        """Return how much of the text's start is an end, perhaps damaged; 0: it is none, PENDING."""
        lengths = (tag_length(start, end, False, self._follows_call) for end in self.ends)
        return next((length for length in lengths if length), 0)

    def _follows_call(self, text: str) -> int:
        return goes_on(text, self._over, is_last=False)

    def _no_parameter(self, text: str) -> str:
        if not self._is_started:
            self._give_up("")
            return text
        self._close_arguments()
        self._finish_call()
        return text

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._start_call(self._name)

    def _parameter_name(self, text: str) -> str:
        begin, name_end, _ = self._form.parameter
        header, end, _ = split(text[:MAX_HEAD], (name_end,))
        if not end and len(text) < MAX_HEAD:
            return self._hold(text)
        name, _, attributes = header.partition('"') if begin.endswith('"') else (header, "", "")
        key, broken, _ = name.strip().partition("\n")
        if broken and key in self._openings and self._form.is_padded:  # the end of the opening tag is missing
            header, end = name[: name.index("\n")], ""
            name = header
        key = self._key_of(name.strip())
        if not (end or broken) or "<" in header or not self._may_be_key(key):
            return self._break_call(text)
        self._key, self._type = key, self._type_of(key, attributes)
        self._raw.append(header + end)
        self._state = self._value_begin
        return text[len(header) + len(end) :]

    def _may_be_key(self, key: str) -> bool:
        return key in self._openings or (_KEY.fullmatch(key) is not None and key not in self._keys)

    def _type_of(self, key: str, attributes: str) -> ValueType:
        is_text, is_none = self._form.type_marks
        if is_text and is_text in attributes:
            return TEXT
        if is_none and is_none in attributes:
            return NOT_TEXT
        return self._types.of(key)

    def _value_begin(self, text: str) -> str:
        begin = self._form.value
        start = skip_blanks(text) if begin else text
        if begin and start is not None and (not start or may_become(start, begin)):
            return self._hold(text)
        if start is None or not start.startswith(begin):
            return self._break_call(text)
        self._start()
        self._raw, self._value, self._is_value_start = [], [], True
        self._openings.pop(self._key, None)
        self._is_streamed = self._may_stream()
        if self._is_streamed:
            self._add(self._key_json() + '"')
        self._state = self._parameter_value
        return start[len(begin) :]

    def _may_stream(self) -> bool:
        return self._type.is_text

    def _parameter_value(self, text: str) -> str:
        found = self._value_ends.find(text, tuple(self._openings.values()), self._is_over, is_last=False)
        self._take_value(text[: found.value], found.is_end and not found.is_implied)
        if not found.is_end:
            return self._hold(text[found.value :])
        self._end_value()
        self._state = self._parameter
        return text[found.taken :]

    def _is_over(self, text: str, is_last: bool) -> int:
        """Say whether a call ends here whose last value has no end tag."""
        for end in self.ends:
            if text.startswith(end):
                marks = self.begins if end in self._section_ends else (*self._section_ends, *self.begins)
                return goes_on(text[len(end) :], marks, is_last)
        return begins_with(text, self.ends, is_last)

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

    def _break_call(self, text: str) -> str:
        """End a call whose tags are no more right: what is not taken of it is content again."""
        if not self._is_started:
            self._give_up("")
            return text
        raw = "".join(self._raw).lstrip()
        self._close_arguments()
        self._finish_call()
        self._say(raw)
        return text

    def _end(self, is_cut: bool) -> None:
        if self._state == self._parameter:
            self._end_between(is_cut)
        elif self._state == self._parameter_value:
            self._end_in_value(is_cut)
        elif self._state in (self._parameter_name, self._value_begin) and self._is_started:
            left = "".join(self._raw) + self._held
            if not is_cut:
                self._close_arguments()
            self._finish_call()
            self._say("" if is_cut else left.strip())
        else:
            super()._end(is_cut)

    def _end_in_value(self, is_cut: bool) -> None:
        found = self._value_ends.find(self._held, tuple(self._openings.values()), self._is_over, is_last=True)
        self._take_value(self._held[: found.value], not is_cut and not found.is_implied)
        self._held = self._held[found.taken :]
        if is_cut and self._is_streamed:
            self._finish_call()
            return
        self._end_value()
        self._end_between(is_cut)

    def _end_between(self, is_cut: bool) -> None:
        """The answer ends between values: an end that is missing is no loss behind the outer mark or a value."""
        held, self._held = self._held, ""
        left = self._skip_ends(held, is_last=True)
        is_marked = bool(self._raw) and self._raw[0] != self._form.function[0]
        if not self._is_started and (left or not (is_marked or held.strip())):
            self._give_up(held)
            return
        self._start()
        if not is_cut:
            self._close_arguments()
        self._finish_call()
        self._say("" if is_cut else left)
