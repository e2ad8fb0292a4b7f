"""OpenAI's chats and completions, whole and streamed: the text must be the expected one from its first byte on.

The API brings text, not tokens. A text that is no beginning of the expected one, or whose `usage` counts other
than the expected tokens, is a wrong answer, at the moment it comes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from benchmarks.load.http_streams import Connection, HttpStreams, post
from benchmarks.load.meter import LoadError, Trace, WrongAnswerError, clock
from benchmarks.load.sse_streams import Usage
from benchmarks.load.whole_answers import WholeConnection
from benchmarks.load.workload import TEMPERATURE, Prompt

PAUSED_S, READING_S = 0.6, 0.05  # of a slow reader


class Said(msgspec.Struct):
    content: str | None = None


class OneChoice(msgspec.Struct):
    delta: Said | None = None  # of a streamed chat
    message: Said | None = None  # of a whole one
    text: str = ""  # of a completion
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        said = self.delta or self.message
        return (said.content or "") if said else self.text


class Answer(msgspec.Struct):
    """A chunk of a streamed answer, or a whole one."""

    choices: list[OneChoice] = []
    usage: Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(Answer).decode


class OpenAIAnswers(HttpStreams):
    """`model` is the served name; a slow reader takes what has come only now and then."""

    def __init__(
        self, target: str, model: str, *, is_chat: bool, is_streamed: bool, reads_slowly: bool = False
    ) -> None:
        super().__init__(target, model)
        self._is_chat, self._is_streamed, self._reads_slowly = is_chat, is_streamed, reads_slowly

    def _protocol(self) -> type[Connection]:
        if not self._is_streamed:
            return WholeOpenAIAnswer
        return SlowlyReadAnswer if self._reads_slowly else StreamedOpenAIAnswer

    def _message(self, prompt: Prompt) -> bytes:
        asked = {"messages": [{"role": "user", "content": prompt.message}]} if self._is_chat else {"prompt": prompt.ids}
        sampling = {"temperature": 0} if prompt.seed is None else {"temperature": TEMPERATURE, "seed": prompt.seed}
        body = {"model": self.model, "max_tokens": len(prompt.expected), "bireme": {"ignore_eos": True}}
        if self._is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        return post(path, self.host, body | asked | sampling)


class WholeOpenAIAnswer(WholeConnection):
    def _take_answer(self, data: bytes) -> None:
        assert self._trace is not None
        text = GrowingText()
        text.take(_decode(data), self._trace)
        text.finish(self._trace)


class StreamedOpenAIAnswer(Connection):
    def __init__(self) -> None:
        super().__init__()
        self._text = GrowingText()

    def _take_event(self, data: bytes) -> None:
        assert self._trace is not None
        if self._has_finished:
            raise WrongAnswerError("an event came after the last")
        if data != b"[DONE]":
            return self._text.take(_decode(data), self._trace)
        self._has_finished = True
        text, self._text = self._text, GrowingText()
        text.finish(self._trace)


class SlowlyReadAnswer(StreamedOpenAIAnswer):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._pause()

    def _pause(self) -> None:
        if not self.is_closed:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(PAUSED_S, self._read_on)

    def _read_on(self) -> None:
        if not self.is_closed:
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(READING_S, self._pause)


class GrowingText:
    """The text of one answer so far."""

    def __init__(self) -> None:
        self._text, self._reason = "", ""
        self._num_told = -1  # tokens, as `usage` says

    def take(self, answer: Answer, trace: Trace) -> None:
        """Raises LoadError at an error, WrongAnswerError at the first text that is not the expected one."""
        if answer.error is not None:
            raise LoadError(str(answer.error.get("message")))
        if answer.usage is not None:
            self._num_told = answer.usage.completion_tokens
        for choice in answer.choices:
            self._text += choice.content
            self._reason = choice.finish_reason or self._reason
        trace.last_at = clock()
        if not (trace.prompt.text or "").startswith(self._text):
            raise WrongAnswerError(f"a text that is not the expected one's beginning, {len(self._text)} characters in")

    def finish(self, trace: Trace) -> None:
        expected = trace.prompt.expected
        if self._num_told != len(expected) or self._text != trace.prompt.text:
            raise WrongAnswerError(
                f"ended with {self._reason!r}, {self._num_told} of {len(expected)} tokens,"
                f" {len(self._text)} of {len(trace.prompt.text or '')} characters"
            )
        trace.push(expected)
        trace.finish(self._reason)
