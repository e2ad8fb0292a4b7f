"""The parts of a model's answer (content, reasoning, tool calls), told apart while it is generated.

A parser takes the text of one answer in pieces, cut anywhere, and returns events. The events together do not depend on
the cuts, and text is held back only while it may still become a marker. Text that only looks like a call (not valid, or
of a function that was not offered) comes as content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Function = Mapping[str, Any]  # OpenAI's function object: name, description, parameters (JSON schema), strict
Guide = dict[str, Any]  # SamplingParams.guided_decoding: exactly one of json, regex, structural_tag, ...


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the user reads."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its name is complete. Calls are numbered from 0 in the order of their starts."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text; the pieces of one call together are one valid JSON object, unless the
    answer was cut (finish reason length).
    """

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Parses one answer. Used from one thread at a time."""

    @property
    def is_reasoning(self) -> bool:
        """Is the current text part of the reasoning? For the count of reasoning tokens."""

    @property
    def begins(self) -> Sequence[str]:
        """Marks that may begin a call; reasoning that was left open ends before such a call."""

    def feed(self, text: str) -> list[Event]:
        """Take more text and return what is certain now; neighboring events of one kind may be merged."""

    def close(self, is_cut: bool = False) -> list[Event]:
        """Return what is held back. `is_cut`: the answer ended by length, not by the model."""


@dataclass(frozen=True, slots=True)
class ParserRequest:
    """What a parser may depend on beside its format."""

    functions: Sequence[Function] = field(default_factory=tuple)  # offered; empty: call syntax is plain content
    prompt_end: str = ""  # the last 256 characters of the rendered prompt: did the template open the reasoning?
    thought_ends: tuple[str, ...] = ()  # of the reasoning; late ones, behind a call, are layout


class ReasoningFormat(Protocol):
    """One way to mark reasoning; an entry of the table in parsers/__init__.py."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers that end the reasoning."""

    @property
    def needs_special_tokens(self) -> bool:
        """Are its markers special tokens, so that these have to be in the text?"""

    def parser(self, request: ParserRequest, new_answer: Callable[[], Parser]) -> Parser:
        """Return a parser that takes reasoning out and feeds the rest to one of the answer."""

    def exempt(self, guide: Guide, request: ParserRequest) -> Guide:
        """Return a guide that leaves reasoning free, where the request's answer begins with it."""


class ToolFormat(Protocol):
    """One way to write tool calls; an entry of the table in parsers/__init__.py."""

    @property
    def needs_special_tokens(self) -> bool:
        """Are its markers special tokens, so that these have to be in the text?"""

    @property
    def trigger(self) -> str:
        """The mark that `guide` begins with, if the guide has the layout that models are taught, so that it may hold
        calls in answers that need not have any; "": it has not, or calls have no mark.
        """

    def parser(self, request: ParserRequest) -> Parser: ...

    def guide(self, functions: Sequence[Function], is_parallel: bool) -> Guide:
        """Return a guide that holds the answer to one call of these functions, or several if `is_parallel`, with
        arguments by their schemas (tool_choice required or named). Raises RequestError.
        """
