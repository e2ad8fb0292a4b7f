"""One JSON object that comes in pieces, checked as it comes.

Its output can at any time be completed to valid JSON by `closers`: a key comes out with the start of its value, numbers
and literals when they are whole, strings as they come. Raw control characters in strings, which models write, come out
escaped; a comma before a closing bracket is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_DEPTH = 64
MAX_ATOM = 512  # characters of a number
_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_BLANK = re.compile(r"[ \t\r\n]+")
_ATOM = re.compile(r"[-+.0-9A-Za-z]+")
_VALID_ATOM = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_ESCAPE_START = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
_THEN = {("key", '"'): "key string", ("key or }", '"'): "key string", (":", ":"): "value"}  # what is expected behind it


class JsonStream:
    """Begins before `{`. With `is_open` it begins inside an object, after a value."""

    words: Mapping[str, str] = {}  # other names of literals

    def __init__(self, is_open: bool = False) -> None:
        self.is_done = False
        self.is_broken = False
        self._stack = ["}"] if is_open else []
        self._expects = "," if is_open else "{"
        self._out: list[str] = []
        self._pending: list[str] = []  # taken, not put out yet
        self._held = ""  # the start of an atom or escape

    def feed(self, text: str) -> tuple[str, str]:
        """Return (output, text not taken): the rest after the end, or from where it is no JSON."""
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text) and not self.is_done and not self.is_broken:
            step = self._take(text, at)
            if step == 0:
                if not self.is_broken:
                    self._held = text[at:]
                    at = len(text)
                break
            at += step
        out, self._out = "".join(self._out), []
        return out, text[at:]

    @property
    def held(self) -> str:
        return "".join(self._pending) + self._held

    @property
    def closers(self) -> str:
        """What completes the output to valid JSON."""
        return ('"' if self._expects == "string" else "") + "".join(reversed(self._stack))

    def _take(self, text: str, at: int) -> int:
        """Return how many characters were taken; 0: more are needed, or it is broken."""
        if self._expects in ("string", "key string"):
            return self._take_string(text, at)
        if blank := _BLANK.match(text, at):
            self._pending.append(blank.group())
            return blank.end() - at
        char = text[at]
        if self._expects in ("value", "value or ]"):
            return self._take_value(text, at, char)
        return self._take_punctuation(char)

    def _take_string(self, text: str, at: int) -> int:
        if run := _RUN.match(text, at):
            self._emit_string(run.group())
            return run.end() - at
        char = text[at]
        if char == '"':
            return self._end_string()
        if char != "\\":
            self._emit_string(f"\\u{ord(char):04x}")
            return 1
        if escape := _ESCAPE.match(text, at):
            self._emit_string(escape.group())
            return escape.end() - at
        start = _ESCAPE_START.match(text, at)
        self.is_broken = start is None or start.end() < len(text)
        return 0

    def _emit_string(self, text: str) -> None:
        (self._out if self._expects == "string" else self._pending).append(text)

    def _end_string(self) -> int:
        if self._expects == "string":
            self._out.append('"')
            self._expects = ","
        else:
            self._pending.append('"')
            self._expects = ":"
        return 1

    def _take_value(self, text: str, at: int, char: str) -> int:
        if char == '"':
            return self._let_out(char, "string")
        if char in "{[":
            return self._open(char)
        if char == "]" and self._expects == "value or ]":
            return self._close()
        atom = _ATOM.match(text, at)
        if atom is None or atom.end() - at > MAX_ATOM:
            self.is_broken = True
            return 0
        if atom.end() == len(text):
            return 0  # it may go on
        value = self.words.get(atom.group(), atom.group())
        if not _VALID_ATOM.fullmatch(value):
            self.is_broken = True
            return 0
        self._let_out(value, ",")
        return atom.end() - at

    def _take_punctuation(self, char: str) -> int:
        expects = self._expects
        if expects == "{" and char == "{":
            return self._open(char)
        if (then := _THEN.get((expects, char))) is not None:
            return self._put_off(char, then)
        if expects == "," and char == ",":
            return self._put_off(char, "key" if self._stack[-1] == "}" else "value or ]")
        if expects in (",", "key", "key or }") and char == self._stack[-1]:
            return self._close()
        self.is_broken = True
        return 0

    def _open(self, char: str) -> int:
        if len(self._stack) >= MAX_DEPTH:
            self.is_broken = True
            return 0
        self._stack.append("}" if char == "{" else "]")
        return self._let_out(char, "key or }" if char == "{" else "value or ]")

    def _close(self) -> int:
        if self._expects in ("key", "value or ]"):
            self._pending = [text for text in self._pending if text != ","]
        char = self._stack.pop()
        self._let_out(char, ",")
        self.is_done = not self._stack
        return 1

    def _let_out(self, text: str, expects: str) -> int:
        self._out += [*self._pending, text]
        self._pending.clear()
        self._expects = expects
        return len(text)

    def _put_off(self, char: str, expects: str) -> int:
        self._pending.append(char)
        self._expects = expects
        return 1
