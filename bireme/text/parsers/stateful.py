"""The common part of tool call parsers: states that take text, events, numbered calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from bireme.text.parsers.base import CallArguments, CallStart, Content, Event, ParserRequest
from bireme.text.parsers.json_stream import JsonStream
from bireme.text.parsers.scan import hold_blanks, skip_blanks, split, take_mark, trim_end
from bireme.text.parsers.tag_ends import PENDING, begins_with, goes_on, tag_length

State = Callable[[str], str]  # takes text; returns what the next state has to take, having set `_state`


class StatefulParser(ABC):
    """A state takes what it can; undecided text goes into `_held`, which stays short."""

    is_reasoning = False
    begins: tuple[str, ...] = ()  # markers that end content
    ends: tuple[str, ...] = ()  # of calls: layout behind one, damaged ones too

    def __init__(self, request: ParserRequest) -> None:
        self._names = frozenset(str(function.get("name", "")) for function in request.functions)
        self._functions = {str(function.get("name", "")): function for function in request.functions}
        self._state: State = self._content
        self._held = ""
        self._events: list[Event] = []
        self._num_calls = 0
        self._is_after_call = False  # layout between and after calls is no content
        self._name_at_hand = ""
        self._blanks = ""  # white space before a call that may turn out to be none
        self._raw: list[str] = []  # text of a call that may turn out to be none
        self._arguments = JsonStream()
        self._thought_ends = request.thought_ends

    def feed(self, text: str) -> list[Event]:
        text, self._held = self._held + text, ""
        while text:
            text = self._state(text)
        return self._take()

    def close(self, is_cut: bool = False) -> list[Event]:
        self._end(is_cut)
        self._held = ""
        return self._take()

    def _hold(self, text: str) -> str:
        self._held = text
        return ""

    def _content(self, text: str) -> str:
        if self._is_after_call and self._layout:
            text = self._skip_ends(text, is_last=False)
            if not text:
                return ""
        before, marker, rest = split(text, self.begins)
        if marker:
            certain = trim_end(before)
            self._say(certain)
            self._blanks = "" if self._is_after_call else before[len(certain) :]
            self._is_after_call = False
            return self._begin(marker, rest)
        certain, blanks = hold_blanks(before)
        self._say(certain)
        if self._is_after_call and not certain:
            blanks = ""
        return self._hold(blanks + rest)

    @property
    def _layout(self) -> tuple[str, ...]:
        return (*self.ends, *self._thought_ends)

    def _skip_ends(self, text: str, is_last: bool) -> str:
        """Drop what is layout behind a call; what may yet be is held."""
        while text := text.lstrip():
            answer = begins_with(text, self.begins, is_last)
            for end in self._layout if answer == 0 else ():
                answer = tag_length(text, end, is_last, partial(self._can_follow, is_last), lambda rest: 1)
                if answer:
                    break
            if answer == PENDING:
                return self._hold(text)
            if answer == 0 or text.startswith(self.begins):
                return text
            text = text[answer:]
        return ""

    def _can_follow(self, is_last: bool, text: str) -> int:
        return goes_on(text, (*self.begins, *self._layout), is_last)

    @abstractmethod
    def _begin(self, marker: str, rest: str) -> str:
        """Enter the state behind a marker; return what that has to take."""

    def _expect(self, text: str, marker: str, then: State) -> str:
        """Take a marker, and blanks before it, and go on in `then`; something else is no call."""
        found = take_mark(text, (marker,))
        if found is None:
            return self._hold(text)
        taken, rest = found
        if taken:
            self._raw.append(text[: len(text) - len(rest)])
            self._state = then
        else:
            self._give_up("")
        return rest

    def _end(self, is_cut: bool) -> None:
        """Emit what is held back, in the current state."""
        if self._state == self._content:
            if self._is_after_call and self._layout:
                self._held = self._skip_ends(self._held, is_last=True)
            self._say("" if self._is_after_call and self._held.isspace() else self._held)
        elif self._state == self._stream_arguments:
            self._break_off("", is_cut)
        else:
            self._give_up(self._held)

    def _start_call(self, name: str) -> None:
        self._events.append(CallStart(self._num_calls, name))
        self._num_calls += 1
        self._raw.clear()
        self._blanks = ""
        self._arguments = JsonStream()

    def _add(self, arguments: str) -> None:
        if arguments:
            self._events.append(CallArguments(self._num_calls - 1, arguments))

    def _await_arguments(self, name: str, header: str) -> None:
        """The call starts with the { of its arguments; the text since its name is content if there is none."""
        self._name_at_hand = name
        self._raw.append(header)
        self._state = self._open_arguments

    def _open_arguments(self, text: str) -> str:
        start = skip_blanks(text)
        if start == "":
            return self._hold(text)
        if start is None or not start.startswith("{"):
            self._give_up("")
            return text
        self._start_call(self._name_at_hand)
        self._state = self._stream_arguments
        return start

    def _stream_arguments(self, text: str) -> str:
        """Stream the arguments, then `_after_arguments`. Broken JSON ends the call."""
        out, rest = self._arguments.feed(text)
        self._add(out)
        if self._arguments.is_done:
            self._state = self._after_arguments
        elif self._arguments.is_broken:
            return self._break_off(rest)
        return rest

    def _after_arguments(self, text: str) -> str:
        """Where more than layout follows the arguments of a call, a format takes it here."""
        self._finish_call()
        return text

    def _break_off(self, rest: str, is_cut: bool = False) -> str:
        """Complete the arguments put out so far; what follows is content. A cut answer stays as it is."""
        held = self._arguments.held
        if is_cut:
            self._add(held)
            return ""
        self._add(self._arguments.closers)
        self._finish_call()
        self._say(held)
        return rest

    def _finish_call(self) -> None:
        self._raw.clear()
        self._is_after_call = True
        self._state = self._content

    def _give_up(self, text: str) -> None:
        """It was no call: all its text is content."""
        raw, self._raw = self._blanks + "".join(self._raw), []
        self._blanks = ""
        self._is_after_call = False
        self._say(raw + text)
        self._state = self._content

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        if text:
            self._events.append(Content(text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events) if len(events) > 1 else events


def merged(events: list[Event]) -> list[Event]:
    """Join neighbors of one kind."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            joined[-1] = CallArguments(last.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
