"""Streamed chats over the OpenAI frontend: a keep-alive connection a slot, each token's text and the usage checked."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from benchmarks.load.http_streams import Connection, HttpStreams
from benchmarks.load.meter import LoadError, WrongAnswerError
from benchmarks.load.workload import Prompt


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    delta: Delta
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    completion_tokens: int


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | None = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


class SseStreams(HttpStreams):
    """Asks for the model that recipes/mocker serves."""

    def __init__(self, target: str, model: str = "mocker") -> None:
        super().__init__(target, model)

    def _protocol(self) -> type[Connection]:
        return ChatConnection

    def _message(self, prompt: Prompt) -> bytes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.message}],
            "max_tokens": len(prompt.expected),
            "stream": True,
            "stream_options": {"include_usage": True},
            "bireme": {"ignore_eos": True},
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


class ChatConnection(Connection):
    _reason = ""
    _num_told = 0  # tokens, as the usage says

    def _take_event(self, data: bytes) -> None:
        assert self._trace is not None
        if data == b"[DONE]":
            return self._finish()
        chunk = _decode_chunk(data)
        if chunk.error is not None:
            raise LoadError(str(chunk.error.get("message")))
        if chunk.usage is not None:
            self._num_told = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                self._take_text(choice.delta.content)
            self._reason = choice.finish_reason or self._reason

    def _take_text(self, text: str) -> None:
        """Tell the trace which tokens these are: their texts one after the other, in full."""
        trace = self._trace
        assert trace is not None
        pieces, begin = trace.prompt.pieces, trace.count
        end, rest = begin, text
        while rest and end < len(trace.prompt.expected) and rest.startswith(pieces[end]):
            rest, end = rest[len(pieces[end]) :], end + 1
        if rest:
            raise WrongAnswerError("a text that belongs to no place of this answer")
        trace.push(trace.prompt.expected[begin:end], text.encode())

    def _finish(self) -> None:
        assert self._trace is not None
        reason, num_told = self._reason, self._num_told
        self._reason, self._num_told, self._has_finished = "", 0, True
        if num_told != self._trace.count:
            raise WrongAnswerError(f"usage says {num_told} tokens, {self._trace.count} came")
        self._trace.finish(reason)
