"""Reasoning between two markers: <think>...</think> of DeepSeek R1, Qwen3 and others.

Either the template has opened it (the prompt ends with the marker), or the model opens it first. Everything after the
end marker is the answer; some models put markers around that too. White space beside the markers is layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from bireme.text.parsers.base import Event, Guide, Parser, ParserRequest, Reasoning
from bireme.text.parsers.scan import hold_blanks, may_become, skip_blanks, split, trim_end


@dataclass(frozen=True)
class ThinkFormat:
    """An entry of the table. Of several markers the first one is what the model is taught now."""

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    answer: tuple[str, str] = ("", "")  # around the answer after reasoning; taken away
    interrupts: tuple[str, ...] = ()  # end the reasoning too, and belong to the answer
    is_implied: bool = False  # an answer begins with reasoning even without the first marker
    is_expected: bool = False  # unless the prompt closed it, the model begins with reasoning
    needs_special_tokens: bool = True

    def parser(self, request: ParserRequest, inner: Parser) -> Parser:
        return ThinkParser(self, self.is_open(request), inner)

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
    def __init__(self, form: ThinkFormat, is_open: bool, inner: Parser) -> None:
        self._form = form
        self._inner = inner
        self._place = "start"  # start, reasoning, gap, answer, after (the answer's own end marker)
        self._is_open = is_open
        self._has_text = False  # of the reasoning: layout at its start has been dropped
        self._answer_end: tuple[str, ...] = ()
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        return self._place == "reasoning" or (self._place == "start" and self._is_open)

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        text, self._held = self._held + text, ""
        if self._place == "start":
            text = self._start(text)
        if self._place == "reasoning" and text:
            text = self._reason(text, events)
        if self._place == "gap" and text:
            text = self._gap(text)
        if self._place == "answer" and text and self._answer_end:
            text = self._until_answer_end(text, events)
        if self._place in ("answer", "after") and text:
            events += self._inner.feed(text)
        return events

    def close(self, is_cut: bool = False) -> list[Event]:
        held, self._held = self._held, ""
        if self._place == "reasoning":
            return self._said(held)
        return [*(self._inner.feed(held) if held else []), *self._inner.close(is_cut)]

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
        before, marker, rest = split(text, self._form.ends + self._form.interrupts)
        if marker:
            events += self._said(trim_end(before))
            self._place = "gap"
            return marker + rest if marker in self._form.interrupts else rest
        certain, blanks = hold_blanks(before)
        events += self._said(certain)
        self._held = blanks + rest
        return ""

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
