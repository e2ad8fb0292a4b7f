"""Calls as a Python list of calls, of Llama 3.2 and 4 and Gemma 3: [f(city="Paris", days=3), g()].

Parsed with `ast`, never run: names of functions, keyword arguments, literals of JSON's kinds. A list comes when it is
whole; any other list is content. Between markers calls may stand without the brackets, one after the other; LFM2's hold
texts without escapes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bireme.errors import RequestError
from bireme.text.parsers.base import Function, Guide, Parser, ParserRequest
from bireme.text.parsers.json_text import json_text
from bireme.text.parsers.python_literals import literal, syntax_tree
from bireme.text.parsers.scan import may_become, skip_blanks, split
from bireme.text.parsers.stateful import StatefulParser

MAX_CHARACTERS = 1 << 16  # of one list; a bound for Python's parser
MAX_DEPTH = 32
_NAME = r"[A-Za-z_][\w.]{0,127}"
_BARE = re.compile(rf"{_NAME}\(")
_BARE_SO_FAR = re.compile(_NAME)
_HEADS = (re.compile(rf"\[\s{{0,64}}{_NAME}\("), re.compile(rf"(?:\[\s{{0,64}})?{_NAME}\("))  # the second: marked
_HEADS_SO_FAR = (re.compile(rf"\[\s{{0,64}}(?:{_NAME})?"), re.compile(rf"\[\s{{0,64}}(?:{_NAME})?|{_NAME}"))
_CALL = re.compile(r"(?:,\s*)?([A-Za-z_][\w.]{0,127})\(")
_ARGUMENT = re.compile(r"(?:,\s*)?([A-Za-z_]\w*)=")
_TEXT = re.compile(r"""(['"])(.*?)\1(?=,\s*[A-Za-z_]\w*=|\)(?:,\s*[A-Za-z_][\w.]*\(|\]?\s*\Z))""", re.DOTALL)
_JSON = json.JSONDecoder(strict=False)
_PLAIN = re.compile(r"""[^\[\](){}"'\\]+""")


@dataclass(frozen=True)
class PythonicFormat:
    """An entry of the table."""

    begin: str = "<|python_start|>"  # may stand before calls
    end: str = "<|python_end|>"
    is_unescaped: bool = False  # texts stand between quotes as they are, with quotes and line breaks in them
    needs_special_tokens: bool = True
    trigger: str = ""  # there is no guide

    def parser(self, request: ParserRequest) -> Parser:
        return PythonicParser(self, request)

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        raise RequestError(
            "tool_choice: the model's pythonic calls can't be enforced by a grammar; send auto or none instead"
        )


class PythonicParser(StatefulParser):
    def __init__(self, form: PythonicFormat, request: ParserRequest) -> None:
        super().__init__(request)
        self._form = form
        self.begins = (form.begin,)
        self._state = self._start
        self._is_marked = False  # behind the marker
        self._marker = ""  # not taken for a call yet
        self._closers: list[str] = []
        self._quote = ""
        self._num_characters = 0

    def _begin(self, marker: str, rest: str) -> str:
        self._raw, self._marker, self._is_marked = [marker], marker, True
        self._state = self._start
        return rest

    def _start(self, text: str) -> str:
        start = skip_blanks(text)
        if start == "" or (start and not self._is_marked and may_become(start, self._form.begin)):
            return self._hold(text)
        if start and (head := _HEADS[self._is_marked].match(start)):
            name = "" if start[0] == "[" else head.group()[:-1]
            self._raw.append(text[: len(text) - len(start)] + name)
            self._closers, self._quote, self._num_characters = [], "", 0
            self._state = self._list
            return start[len(name) :]
        if start and _HEADS_SO_FAR[self._is_marked].fullmatch(start):
            return self._hold(text)
        self._give_up("")
        self._is_marked = False
        return text

    def _list(self, text: str) -> str:
        at = 0
        while at < len(text):
            if self._form.is_unescaped and self._is_marked and text[at] == self._form.end[0]:
                if may_become(text[at:], self._form.end):
                    self._held = text[at:]
                    break
                if text.startswith(self._form.end, at):
                    return self._end_list(text, at)
            step = self._step(text, at)
            if step == 0:
                self._held = text[at:]
                break
            at += step
            if not self._closers or self._num_characters + at > MAX_CHARACTERS or len(self._closers) > MAX_DEPTH:
                return self._end_list(text, at)
        self._raw.append(text[:at])
        self._num_characters += at
        return ""

    def _step(self, text: str, at: int) -> int:
        """Take one lexeme; 0: it is not whole yet."""
        char = text[at]
        if char == "\\":
            return 2 if at + 1 < len(text) else 0
        if self._quote:
            self._quote = "" if char == self._quote else self._quote
            return 1
        if char in "\"'":
            self._quote = char
        elif char in "([{":
            self._closers.append({"(": ")", "[": "]", "{": "}"}[char])
        elif char in ")]}":
            if self._closers.pop() != char:
                self._closers.clear()
        elif plain := _PLAIN.match(text, at):
            # At most up to where the limit ends the list: the cut must not depend on how the text came.
            return min(plain.end() - at, MAX_CHARACTERS - self._num_characters - at + 1)
        return 1

    def _end_list(self, text: str, at: int) -> str:
        self._raw.append(text[:at])
        calls = read_calls("".join(self._raw).removeprefix(self._marker), self._names)
        if calls:
            self._put_out(calls)
            self._state = self._after_list
        elif self._form.is_unescaped and self._is_marked:
            self._state = self._unescaped
            self._num_characters += at
        else:
            self._give_up("")
            self._is_marked = False
        return text[at:]

    def _unescaped(self, text: str) -> str:
        """It is no Python: up to the mark behind it, it may be calls with texts as they are."""
        before, marker, rest = split(text, (self._form.end,))
        room = max(MAX_CHARACTERS - self._num_characters, 0)
        self._raw.append(before[:room])
        self._num_characters += len(before)
        if not marker and self._num_characters <= MAX_CHARACTERS:
            return self._hold(rest)
        is_whole = self._num_characters <= MAX_CHARACTERS
        calls = read_unescaped("".join(self._raw).removeprefix(self._marker), self._names) if is_whole else []
        self._is_marked = False
        if not calls:
            self._give_up("")
            return before[room:] + marker + rest
        self._put_out(calls)
        return rest

    def _put_out(self, calls: Sequence[tuple[str, str]]) -> None:
        for name, arguments in calls:
            self._start_call(name)
            self._add(arguments)
        self._finish_call()

    def _after_list(self, text: str) -> str:
        start, end = skip_blanks(text), self._form.end
        if start == "" or (start and self._may_go_on(start)):
            return self._hold(text)
        if start and self._is_marked and _BARE.match(start):
            self._marker, self._state = "", self._start
            return text
        self._is_marked, self._state = False, self._content
        return start[len(end) :] if start and start.startswith(end) else text

    def _may_go_on(self, start: str) -> bool:
        """Whether this may become the end, or another call."""
        return may_become(start, self._form.end) or (self._is_marked and _BARE_SO_FAR.fullmatch(start) is not None)

    def _end(self, is_cut: bool) -> None:
        if self._state == self._after_list:
            self._state = self._content
            self._say(self._held.strip())
        else:
            super()._end(is_cut)


def read_calls(text: str, names: frozenset[str]) -> list[tuple[str, str]]:
    """Return (name, arguments as JSON) of each call; empty: the text is no list of calls of these functions."""
    try:
        tree = syntax_tree(text)
        if isinstance(tree, ast.Call):
            return [_read_call(tree, names)]
        return [_read_call(node, names) for node in tree.elts] if isinstance(tree, ast.List) else []
    except (ValueError, RecursionError, OverflowError):
        return []


def read_unescaped(text: str, names: frozenset[str]) -> list[tuple[str, str]]:
    """Return the calls of a list whose texts end at a quote that an argument, a call or the end follows."""
    left, calls = text.strip().removeprefix("["), []
    while match := _CALL.match(left):
        name, left = match.group(1), left[match.end() :]
        arguments: dict[str, Any] = {}
        while key := _ARGUMENT.match(left):
            left = left[key.end() :]
            value = _TEXT.match(left)
            try:
                arguments[key.group(1)], end = (value.group(2), value.end()) if value else _JSON.raw_decode(left)
            except (ValueError, RecursionError):
                return []
            left = left[end:]
        if name not in names or not left.startswith(")"):
            return []
        calls.append((name, json_text(arguments)))
        left = left[1:]
    return calls if left.strip() in ("", "]") else []


def _read_call(node: ast.expr, names: frozenset[str]) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keyword arguments")
    name = ast.unparse(node.func)
    if name not in names or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no function that was offered")
    arguments = {str(keyword.arg): literal(keyword.value) for keyword in node.keywords}
    return name, json_text(arguments)
