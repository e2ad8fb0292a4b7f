"""Reasoning between two markers: <think>...</think> of DeepSeek R1, Qwen3 and others.

Either the template has opened it (the prompt ends with the marker), or the model opens it first. Everything after the
end marker is the answer; some models put markers around that too, of which the template may have opened the first.

A call ends the reasoning too, as models forget the end marker before it. Only what the parser of the answer takes for a
call is one: a mark that is thought about stays a thought.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bireme.guides import TRIGGER
from bireme.text.parsers.base import CallStart, Event, Guide, Parser, ParserRequest, Reasoning
from bireme.text.parsers.scan import hold_blanks, may_become, split, take_mark

MAX_CALL_HEAD = 4096  # characters behind a mark in which a call must have begun to end the reasoning


@dataclass(frozen=True)
class ThinkFormat:
    """An entry of the table. Of several markers the first one is what the model is taught now."""

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    answer: tuple[str, str] = ("", "")  # around the answer after reasoning; taken away
    trailer: str = ""  # behind the answer's last marker; taken away
    has_answer_alone: bool = False  # the answer's markers stand without reasoning, too
    has_end_alone: bool = False  # an answer without reasoning may begin with the last marker
    needs_answer: bool = False  # the answer's first marker always comes: a guide holds behind it
    is_implied: bool = False  # an answer begins with reasoning even without the first marker
    is_expected: bool = False  # unless the prompt closed it, the model begins with reasoning
    needs_special_tokens: bool = True

    def parser(self, request: ParserRequest, new_answer: Callable[[], Parser]) -> Parser:
        begin, end = self.answer
        is_answer = bool(begin) and request.prompt_end.rstrip().endswith(begin)
        return ThinkParser(self, self.is_open(request), new_answer, end if is_answer else "")

    def exempt(self, guide: Guide, request: ParserRequest) -> Guide:
        if TRIGGER in guide:
            return self._with_thoughts(guide, request)
        expected = self.is_expected and not self._is_closed(request)
        if not (self.is_open(request) or expected):
            return guide
        return {**guide, "reasoning_end": self.ends[0] + (self.answer[0] if self.needs_answer else "")}

    def _with_thoughts(self, guide: Guide, request: ParserRequest) -> Guide:
        """Tell a guide that waits for its trigger where not to."""
        if self._is_closed(request):
            return guide
        begin = {} if self.is_open(request) else {"reasoning_begin": self.begins[0].strip()}
        return {**guide, TRIGGER: {**guide[TRIGGER], **begin}, "reasoning_end": self.ends[0]}

    def is_open(self, request: ParserRequest) -> bool:
        """Does the answer begin inside the reasoning?"""
        if request.prompt_end.rstrip().endswith(tuple(begin.rstrip() for begin in self.begins)):
            return True
        return self.is_implied and not self._is_closed(request)

    def _is_closed(self, request: ParserRequest) -> bool:
        return request.prompt_end.rstrip().endswith(self.ends)


class ThinkParser:
    begins = ()

    def __init__(
        self, form: ThinkFormat, is_open: bool, new_answer: Callable[[], Parser], answer_end: str = ""
    ) -> None:
        """`answer_end`: the prompt has opened the answer, which ends there."""
        self._form = form
        self._new_answer = new_answer
        self._inner = new_answer()
        self._answer_begin = form.answer[:1] if form.has_answer_alone else ()
        self._marks = form.ends + self._answer_begin + tuple(self._inner.begins)  # that may end the reasoning
        self._openings = dict.fromkeys(form.begins, "reasoning")  # mark: the place behind it
        if not is_open:
            self._openings |= dict.fromkeys(form.ends if form.has_end_alone else (), "gap")
            self._openings |= dict.fromkeys(self._answer_begin, "gap")
        self._place = "answer" if answer_end else "start"  # a key of _STEPS
        self._is_open = is_open
        self._has_text = False  # of the reasoning: layout at its start has been dropped
        self._answer_end = self._ends_of(answer_end) if answer_end else ()
        self._held = ""
        self._blanks = ""  # before a mark that may turn out to be a thought
        self._tried = ""  # that mark and what follows, as far as the parser of the answer was asked

    @property
    def is_reasoning(self) -> bool:
        return self._place in ("reasoning", "call head") or (self._place == "start" and self._is_open)

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        text, self._held = self._held + text, ""
        while text:
            text = _STEPS[self._place](self, text, events)
        return events

    def _hold(self, text: str) -> str:
        self._held = text
        return ""

    def close(self, is_cut: bool = False) -> list[Event]:
        events: list[Event] = []
        while self._place == "call head":
            found = self._inner.close(is_cut)
            if self._is_call(found):
                return [*events, *found]
            events += self.feed(self._no_call(events))
        held, self._held = ("" if self._place == "trailer" else self._held), ""
        if self._place == "reasoning":
            return [*events, *self._said(held)]
        return [*events, *(self._inner.feed(held) if held else []), *self._inner.close(is_cut)]

    def _start(self, text: str, events: list[Event]) -> str:
        found = take_mark(text, self._openings)
        if found is None:
            return self._hold(text)
        mark, rest = found
        self._place = self._openings.get(mark, "reasoning" if self._is_open else "answer")
        return mark + rest if mark in self._answer_begin else rest  # `_gap` takes the answer's

    def _reason(self, text: str, events: list[Event]) -> str:
        before, marker, rest = split(text, self._marks)
        certain, blanks = hold_blanks(before)
        events += self._said(certain)
        if not marker:
            return self._hold(blanks + rest)
        if marker in self._form.ends:
            self._place = "gap"
            return rest
        if marker in self._answer_begin:
            self._place = "gap"
            return marker + rest
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

    def _gap(self, text: str, events: list[Event]) -> str:
        start, (begin, end) = text.lstrip(), self._form.answer
        if not start or may_become(start, begin):
            return self._hold(start)
        self._place = "answer"
        if begin and start.startswith(begin):
            self._answer_end = self._ends_of(end)
            return start[len(begin) :].lstrip()
        return start

    def _answer(self, text: str, events: list[Event]) -> str:
        if not self._answer_end:
            events += self._inner.feed(text)
            return ""
        before, marker, rest = split(text, self._answer_end)
        events += self._inner.feed(before)
        if not marker:
            return self._hold(rest)
        self._place = "trailer" if self._form.trailer not in ("", marker) else "answer"
        self._answer_end = ()
        return rest

    def _ends_of(self, end: str) -> tuple[str, ...]:
        return (end, self._form.trailer) if self._form.trailer else (end,)

    def _behind_answer(self, text: str, events: list[Event]) -> str:
        start = text.lstrip()
        if not start or may_become(start, self._form.trailer):
            return self._hold(text)
        self._place = "answer"
        return start.removeprefix(self._form.trailer)

    def _said(self, text: str) -> list[Event]:
        if not self._has_text:
            text = text.lstrip()
            self._has_text = bool(text)
        return [Reasoning(text)] if text else []


_STEPS = {  # each takes text and returns what the next one has to take
    "start": ThinkParser._start,
    "reasoning": ThinkParser._reason,
    "call head": ThinkParser._call_head,
    "gap": ThinkParser._gap,
    "answer": ThinkParser._answer,
    "trailer": ThinkParser._behind_answer,  # behind the answer's own end marker
}
