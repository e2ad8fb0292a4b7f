"""Reasoning between two markers: <think>...</think> of DeepSeek R1, Qwen3 and others.

Either the template has opened it (the prompt ends with the marker), or the model opens it first. Everything after the
end marker is the answer; some models put markers around that too. White space beside the markers is layout.

A call ends the reasoning too, as models forget the end marker before it. Behind a mark of calls the parser of the
answer is asked: only what it takes for a call is one, so that a mark that is thought about stays a thought.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bireme.text.parsers.base import CallStart, Event, Guide, Parser, ParserRequest, Reasoning
from bireme.text.parsers.scan import hold_blanks, may_become, skip_blanks, split

MAX_CALL_HEAD = 4096  # characters behind a mark in which a call must have begun to end the reasoning


@dataclass(frozen=True)
class ThinkFormat:
    """An entry of the table. Of several markers the first one is what the model is taught now."""

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    answer: tuple[str, str] = ("", "")  # around the answer after reasoning; taken away
    is_implied: bool = False  # an answer begins with reasoning even without the first marker
    is_expected: bool = False  # unless the prompt closed it, the model begins with reasoning
    needs_special_tokens: bool = True

    def parser(self, request: ParserRequest, new_answer: Callable[[], Parser]) -> Parser:
        return ThinkParser(self, self.is_open(request), new_answer)

    def exempt(self, guide: Guide, request: ParserRequest) -> Guide:
        expected = self.is_expected and not self._is_closed(request)
        if not (self.is_open(request) or expected):
            return guide
        return {**guide, "reasoning_end": self.ends[0]}

    def is_open(self, request: ParserRequest) -> bool:
        """Does the answer begin inside the reasoning?"""
        if request.prompt_end.rstrip().endswith(tuple(begin.rstrip() for begin in self.begins)):
            return True
        return self.is_implied and not self._is_closed(request)

    def _is_closed(self, request: ParserRequest) -> bool:
        return request.prompt_end.rstrip().endswith(self.ends)


class ThinkParser:
    begins = ()

    def __init__(self, form: ThinkFormat, is_open: bool, new_answer: Callable[[], Parser]) -> None:
        self._form = form
        self._new_answer = new_answer
        self._inner = new_answer()
        self._marks = form.ends + tuple(self._inner.begins)  # that may end the reasoning
        self._place = "start"  # start, reasoning, call head, gap, answer, after (the answer's own end marker)
        self._is_open = is_open
        self._has_text = False  # of the reasoning: layout at its start has been dropped
        self._answer_end: tuple[str, ...] = ()
        self._held = ""
        self._blanks = ""  # before a mark that may turn out to be a thought
        self._tried = ""  # that mark and what follows, as far as the parser of the answer was asked

    @property
    def is_reasoning(self) -> bool:
        return self._place in ("reasoning", "call head") or (self._place == "start" and self._is_open)

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        text, self._held = self._held + text, ""
        if self._place == "start":
            text = self._start(text)
        while self._place in ("reasoning", "call head") and text:
            text = self._reason(text, events) if self._place == "reasoning" else self._call_head(text, events)
        if self._place == "gap" and text:
            text = self._gap(text)
        if self._place == "answer" and text and self._answer_end:
            text = self._until_answer_end(text, events)
        if self._place in ("answer", "after") and text:
            events += self._inner.feed(text)
        return events

    def close(self, is_cut: bool = False) -> list[Event]:
        events: list[Event] = []
        while self._place == "call head":
            found = self._inner.close(is_cut)
            if self._is_call(found):
                return [*events, *found]
            events += self.feed(self._no_call(events))
        held, self._held = self._held, ""
        if self._place == "reasoning":
            return [*events, *self._said(held)]
        return [*events, *(self._inner.feed(held) if held else []), *self._inner.close(is_cut)]

    def _start(self, text: str) -> str:
        start, begins = skip_blanks(text), self._form.begins
        if start is not None and (not start or any(may_become(start, begin) for begin in begins)):
            self._held = text
            return ""
        for begin in begins:
            if start is not None and start.startswith(begin):
                self._place = "reasoning"
                return start[len(begin) :]
        self._place = "reasoning" if self._is_open else "answer"
        return text

    def _reason(self, text: str, events: list[Event]) -> str:
        before, marker, rest = split(text, self._marks)
        certain, blanks = hold_blanks(before)
        events += self._said(certain)
        if not marker:
            self._held = blanks + rest
            return ""
        if marker in self._form.ends:
            self._place = "gap"
            return rest
        self._place, self._blanks = "call head", blanks
        return marker + rest

    def _call_head(self, text: str, events: list[Event]) -> str:
        """Behind a mark of calls: let the parser of the answer say whether a call begins."""
        taken = text[: MAX_CALL_HEAD - len(self._tried)]
        self._tried += taken
        found = self._inner.feed(taken)
        if self._is_call(found):
            self._place, self._tried = "answer", ""
            events += found
        elif found or len(self._tried) == MAX_CALL_HEAD:
            return self._no_call(events) + text[len(taken) :]
        return text[len(taken) :]

    def _is_call(self, found: list[Event]) -> bool:
        return bool(found) and isinstance(found[0], CallStart)

    def _no_call(self, events: list[Event]) -> str:
        """Make the mark a thought; return what has to be read again behind it."""
        tried, self._tried = self._tried, ""
        mark = next(mark for mark in self._inner.begins if tried.startswith(mark))
        events += self._said(self._blanks + mark)
        self._inner, self._place = self._new_answer(), "reasoning"
        return tried[len(mark) :]

    def _gap(self, text: str) -> str:
        start, (begin, end) = text.lstrip(), self._form.answer
        if not start or may_become(start, begin):
            self._held = start
            return ""
        self._place = "answer"
        if begin and start.startswith(begin):
            self._answer_end = (end,)
            return start[len(begin) :].lstrip()
        return start

    def _until_answer_end(self, text: str, events: list[Event]) -> str:
        before, marker, rest = split(text, self._answer_end)
        if not marker:
            self._held = rest
            return before
        events += self._inner.feed(before)
        self._place = "after"
        return rest

    def _said(self, text: str) -> list[Event]:
        if not self._has_text:
            text = text.lstrip()
            self._has_text = bool(text)
        return [Reasoning(text)] if text else []
