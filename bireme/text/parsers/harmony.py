"""OpenAI's harmony format of gpt-oss: channels of reasoning, calls and the answer in one stream.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The recipient may stand before the first channel, where the template writes it, and the prompt may end within such a
header: `<|start|>assistant` is the prompt's, ` to=functions.f<|channel|>commentary json<|message|>{...}` the answer.
Models leave <|start|> out too, and end their thoughts with the next header.

Messages: `analysis` is reasoning, `to=functions.f` a call, everything else content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bireme.text.parsers.base import Content, Function, Guide, Parser, ParserRequest, Reasoning
from bireme.text.parsers.envelope import MAX_HEAD
from bireme.text.parsers.guides import call_tags, separated, structural_tag
from bireme.text.parsers.scan import may_become, skip_blanks, split
from bireme.text.parsers.stateful import StatefulParser

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ROLE, _RECIPIENT = "assistant", "to="
_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CALL_HEADER = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"


@dataclass(frozen=True)
class HarmonyFormat:
    """An entry of both tables: name it for reasoning and for tools."""

    needs_special_tokens: bool = True
    ends: tuple[str, ...] = ()  # the parser knows its own
    trigger: str = ""  # a call is told by its recipient, behind a mark that all messages have

    def parser(self, request: ParserRequest, new_answer: Callable[[], Parser] | None = None) -> Parser:
        return HarmonyParser(request)

    def exempt(self, guide: Guide, request: ParserRequest) -> Guide:
        is_call = _CHANNEL in str(guide.get("structural_tag", ""))
        return {**guide, "reasoning_end": f"<|end|>{_START}assistant" if is_call else f"{_CHANNEL}final{_MESSAGE}"}

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        """One call: the model stops after each, so there are no parallel ones."""
        return structural_tag(separated(call_tags(functions, _CALL_HEADER.format, ""), "", is_parallel=False))


class HarmonyParser(StatefulParser):
    begins = (_START, _CHANNEL, *_ENDS)

    def __init__(self, request: ParserRequest) -> None:
        super().__init__(request)
        self._channel = ""  # of the message at hand; "": none is open
        self._state = self._between

    @property
    def is_reasoning(self) -> bool:  # type: ignore[override]
        return self._state == self._body and self._channel == "analysis"

    def _between(self, text: str) -> str:
        """Where a message may begin: take the part of a header that has no marker before it."""
        start = skip_blanks(text)
        rest = skip_blanks(start.removeprefix(_ROLE)) if start is not None else None
        if start is not None and rest is not None:
            if may_become(start, _ROLE) or any(may_become(rest, mark) for mark in (_RECIPIENT, _CHANNEL)):
                return self._hold(text)
            if rest.startswith((_RECIPIENT, _CHANNEL)):
                self._raw, self._state = [text[: len(text) - len(rest)]], self._header
                return rest
        self._state = self._content
        return text

    def _begin(self, marker: str, rest: str) -> str:
        if marker in _ENDS:
            self._state = self._between
            return rest
        self._raw = [marker]
        self._state = self._header
        return rest

    def _header(self, text: str) -> str:
        """Take the header up to its <|message|>; what has none is content."""
        before, marker, _ = split(text[:MAX_HEAD], (_MESSAGE, _START, *_ENDS))
        if not marker and len(text) < MAX_HEAD:
            return self._hold(text)
        if marker != _MESSAGE:
            self._no_header("")
            return text
        self._open_message("".join(self._raw) + before)
        return text[len(before) + len(_MESSAGE) :]

    def _no_header(self, text: str) -> None:
        """It only looked like a header: it belongs to the message before it, if that is still open."""
        if self._channel:
            self._pass_on("".join(self._raw) + text)
            self._raw.clear()
            self._state = self._body
        else:
            self._give_up(text)

    def _open_message(self, header: str) -> None:
        channel = header.partition(_CHANNEL)[2].strip()
        to = _TO.search(header)
        self._channel = (re.split(r"[\s<]", channel, maxsplit=1) or [""])[0]
        if to is not None and to.group(1) in self._names:
            self._raw, self._channel = [header], ""
            self._await_arguments(to.group(1), _MESSAGE)
        else:
            self._raw.clear()
            self._blanks = ""
            self._state = self._body

    def _body(self, text: str) -> str:
        before, marker, rest = split(text, self.begins)
        self._pass_on(before)
        if not marker:
            return self._hold(rest)
        if marker in _ENDS:
            self._channel, self._state = "", self._between
        else:
            self._raw, self._state = [marker], self._header
        return rest

    def _pass_on(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text) if self._channel == "analysis" else Content(text))

    def _after_arguments(self, text: str) -> str:
        start = text.lstrip()
        if not start or any(may_become(start, end) for end in _ENDS):
            return self._hold(start)
        self._finish_call()
        return start

    def _end(self, is_cut: bool) -> None:
        if self._state == self._between:
            self._state = self._content
            super()._end(is_cut)
        elif self._state == self._body:
            self._pass_on(self._held)
        elif self._state == self._header:
            self._no_header(self._held)
        elif self._state == self._after_arguments:
            self._finish_call()
            self._say(self._held)
        else:
            super()._end(is_cut)
