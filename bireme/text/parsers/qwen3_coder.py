"""Calls of Qwen3-Coder: a function and its parameters as tags, values as plain text.

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value's JSON type is that of its parameter in the function's schema; a text that does not fit stays a string.
Parameters stream one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.envelope import MAX_HEAD
from bireme.text.parsers.guides import call_tags, parameters_of, separated, structural_tag
from bireme.text.parsers.scan import may_become, skip_blanks, split
from bireme.text.parsers.stateful import StatefulParser

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


@dataclass(frozen=True)
class Qwen3CoderFormat:
    needs_special_tokens: bool = True

    def parser(self, request: ParserRequest) -> Parser:
        return Qwen3CoderParser(request)

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        end = f"\n{_FUNCTION_END}\n{_CALL_END}"
        tags = call_tags(functions, lambda name: f"{_CALL}\n{_FUNCTION}{name}>\n", end, "qwen_xml")
        return structural_tag(separated(tags, "\n", is_parallel))


class Qwen3CoderParser(StatefulParser):
    begins = (_CALL, _FUNCTION)  # the outer marker is sometimes left out

    def __init__(self, request: ParserRequest) -> None:
        super().__init__(request)
        self._types: Mapping[str, Any] = {}
        self._key = ""
        self._keys: set[str] = set()
        self._value: list[str] = []

    def _begin(self, marker: str, rest: str) -> str:
        self._raw = [marker]
        self._state = self._function_name if marker == _FUNCTION else self._function
        return rest

    def _function(self, text: str) -> str:
        start = skip_blanks(text)
        if start is not None and (not start or may_become(start, _FUNCTION)):
            self._held = text
            return ""
        if start is None or not start.startswith(_FUNCTION):
            self._give_up("")
            return text
        self._raw.append(text[: len(text) - len(start)] + _FUNCTION)
        self._state = self._function_name
        return start[len(_FUNCTION) :]

    def _function_name(self, text: str) -> str:
        name, end, _ = split(text[:MAX_HEAD], (">",))
        if not end and len(text) < MAX_HEAD:
            self._held = text
            return ""
        if not end or name.strip() not in self._names:
            self._give_up("")
            return text
        self._start_call(name.strip())
        properties = parameters_of(self._functions[name.strip()]).get("properties")
        self._types = properties if isinstance(properties, dict) else {}
        self._keys = set()
        self._state = self._parameter
        return text[len(name) + 1 :]

    def _parameter(self, text: str) -> str:
        start = skip_blanks(text)
        marks = (_PARAMETER, _FUNCTION_END)
        if start is not None and (not start or any(may_become(start, mark) for mark in marks)):
            self._held = text
            return ""
        if start is not None and start.startswith(_PARAMETER):
            self._state = self._parameter_name
            return start[len(_PARAMETER) :]
        self._add("}" if self._keys else "{}")
        if start is not None and start.startswith(_FUNCTION_END):
            self._state = self._call_end
            return start[len(_FUNCTION_END) :]
        self._finish_call()
        return text

    def _parameter_name(self, text: str) -> str:
        name, end, _ = split(text[:MAX_HEAD], (">",))
        if not end and len(text) < MAX_HEAD:
            self._held = text
            return ""
        if not end or name.strip() in self._keys:
            self._add("}" if self._keys else "{}")
            self._finish_call()
            self._say(_PARAMETER)
            return text
        self._key, self._value = name.strip(), []
        self._state = self._parameter_value
        return text[len(name) + 1 :]

    def _parameter_value(self, text: str) -> str:
        before, end, rest = split(text, (_PARAMETER_END,))
        self._value.append(before)
        if not end:
            self._held = rest
            return ""
        self._end_value()
        self._state = self._parameter
        return rest

    def _end_value(self) -> None:
        text = "".join(self._value).removeprefix("\n").removesuffix("\n")
        value = as_json(text, self._types.get(self._key))
        self._add(f"{', ' if self._keys else '{'}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._keys.add(self._key)

    def _call_end(self, text: str) -> str:
        start = skip_blanks(text)
        if start is not None and (not start or may_become(start, _CALL_END)):
            self._held = text
            return ""
        self._finish_call()
        return start[len(_CALL_END) :] if start is not None and start.startswith(_CALL_END) else text

    def _end(self, is_cut: bool) -> None:
        if self._state == self._parameter_value:
            self._value.append(self._held)
            self._held = ""
            self._end_value()
        if self._state in (self._parameter, self._parameter_name, self._parameter_value):
            if not is_cut:
                self._add("}" if self._keys else "{}")
            left = (_PARAMETER if self._state == self._parameter_name else "") + self._held
            self._finish_call()
            self._say("" if is_cut else left.strip())
        elif self._state == self._call_end:
            self._finish_call()
            self._say(self._held.strip())
        else:
            super()._end(is_cut)


def as_json(text: str, schema: Any) -> str:
    """Return a parameter's text as JSON of the type that its schema names."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    names = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    is_text = not names or names <= {"string"}
    if is_text and not (isinstance(schema, dict) and not names and schema):
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(_python_word(text.strip()), parse_constant=_refuse)
        if _is_of(value, names):
            return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _python_word(text: str) -> str:
    return {"True": "true", "False": "false", "None": "null"}.get(text, text)


def _refuse(word: str) -> None:
    raise ValueError(word)


_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def _is_of(value: Any, names: set[str]) -> bool:
    """Whether a value has one of these types. Strings come as they are, so a quoted one does not count."""
    if not names:
        return not isinstance(value, str)
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, _KINDS.get(name, ())) for name in names)
