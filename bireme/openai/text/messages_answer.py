"""An answer in the form of Anthropic's Messages: a whole message, or events from a template.

Blocks have the order in which the model wrote them. Each event of a stream depends on the block that is open, so the
template keeps that, and pieces of text whose events are made late open their block then.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from bireme.messages import Usage
from bireme.openai.http.event_stream import SUFFIX, EventStream
from bireme.openai.text.messages_request import MessagesRequest
from bireme.pipelines.chat_answer import ShownLogprobs, encode_json
from bireme.pipelines.chat_usage import timing_json
from bireme.text.output import TokenDelta
from bireme.text.parsers.json_stream import JsonStream
from bireme.text.parsers.json_text import SURROGATE

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
SIGNATURE = "unsigned"  # of thoughts: clients want one; whoever sends it back is believed
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b'
_DELTAS = {
    "text": b'"text_delta","text":',
    "thinking": b'"thinking_delta","thinking":',
    "tool_use": b'"input_json_delta","partial_json":',
}
Kind = Literal["", "text", "thinking", "tool_use"]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def usage_of(usage: Usage, num_thinking: int) -> dict[str, Any]:
    """Return Anthropic's `usage`, whose input tokens are those that were not in the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": num_thinking},
    }


def ending(request: MessagesRequest, reason: str, stop_string: str, usage: Usage) -> dict[str, Any]:
    if stop_string in request.stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    told = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}.get(reason, reason)
    limit = request.chat.sampling.params.max_tokens
    if told == "max_tokens" and limit is not None and usage.completion_tokens < limit:
        told = "model_context_window_exceeded"
    return {"stop_reason": told, "stop_sequence": None}


@dataclass(slots=True)
class _WholeBlock:
    kind: Kind
    name: str = ""  # of a tool
    texts: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        text = "".join(self.texts)
        if self.kind == "text":
            return {"type": "text", "text": text}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        return {"type": "tool_use", "id": new_id("toolu"), "name": self.name, "input": _object(text)}


def _object(text: str) -> Any:
    """Return the arguments of a call; of one that was cut, what there is of them."""
    stream = JsonStream()
    taken, _ = stream.feed(text)
    whole = taken + stream.closers if taken else "{}"
    try:
        return msgspec.json.decode(whole)
    except msgspec.MsgspecError:
        return _readable(whole)


def _readable(text: str) -> Any:
    """Return the value of JSON that msgspec refuses: no lone surrogates, null for numbers that no float can hold."""
    try:
        value = json.loads(text, parse_float=_finite)
        return msgspec.json.decode(SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except (msgspec.MsgspecError, ValueError):
        return {}


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


class WholeMessage:
    """Collects a message (chat_answer.ChatOutput)."""

    def __init__(self, request: MessagesRequest) -> None:
        self.id = new_id("msg")
        self._request = request
        self._blocks: list[_WholeBlock] = []
        self._blank = ""  # white space that becomes text with what follows it, if that is text
        self._deltas: list[TokenDelta] = []  # text that is made at the end
        self._ending: dict[str, Any] = {}
        self._num_reasoning = 0
        self.usage = Usage()

    def text(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        if not self._blocks or self._blocks[-1].kind != "text":
            self._blank += text
            if not text.strip():
                return
            text = self._blank
        self._block("text").texts.append(text)

    def delta(self, index: int, delta: TokenDelta) -> None:
        self._deltas.append(delta)

    def reasoning(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        block = self._block("thinking")
        if self._request.shows_thinking:
            block.texts.append(text)

    def call(self, index: int, number: int, name: str, logprobs: ShownLogprobs) -> None:
        self._begin(_WholeBlock("tool_use", name))

    def arguments(self, index: int, number: int, text: str, logprobs: ShownLogprobs) -> None:
        self._blocks[-1].texts.append(text)

    def finish(
        self, index: int, reason: str, logprobs: ShownLogprobs, usage: Usage, num_reasoning: int, stop_string: str
    ) -> None:
        if text := "".join(delta.text for delta in self._deltas):
            self._block("text").texts.append(text)
        self._ending = ending(self._request, reason, stop_string, usage)
        self.usage, self._num_reasoning = usage, num_reasoning

    def json(self) -> bytes:
        body = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.chat.model,
            "content": [block.json() for block in self._blocks],
            **self._ending,
            "usage": usage_of(self.usage, self._num_reasoning) | {"service_tier": "standard"},
        }
        if self._request.chat.return_timing:
            body["bireme"] = timing_json([self.usage])
        return encode_json(body)

    def _block(self, kind: Kind) -> _WholeBlock:
        if not self._blocks or self._blocks[-1].kind != kind:
            self._begin(_WholeBlock(kind))
        return self._blocks[-1]

    def _begin(self, block: _WholeBlock) -> None:
        self._blocks.append(block)
        self._blank = ""


class MessageTemplate:
    """Makes the events of one answer and knows which block is open (event_stream.TextTemplate)."""

    def __init__(self, request: MessagesRequest) -> None:
        self.id = new_id("msg")
        self._request = request
        self._open: Kind = ""
        self._number = -1  # of the open block, or of the last one
        self._head = b""  # of the open block's deltas
        self._blank = ""  # white space that becomes text with what follows it, if that is text
        self.num_prompt_tokens = 0

    def start(self) -> bytes:
        """Return the first event. How much of the prompt was in the cache is known at the end."""
        usage = usage_of(Usage(prompt_tokens=self.num_prompt_tokens), 0) | {"service_tier": "standard"}
        message: dict[str, Any] = {
            "id": self.id, "type": "message", "role": "assistant", "model": self._request.chat.model,
            "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip
        return _event("message_start", {"message": message})

    def text(self, index: int, text: str) -> bytes:
        if self._open == "text":
            return self._delta(text)
        self._blank += text
        return self.texts(index, (encode_json(self._blank),)) if text.strip() else b""

    def texts(self, index: int, jsons: Iterable[bytes]) -> bytes:
        begun = b"" if self._open == "text" else self._begin("text", {"text": ""})
        head, tail = self._head, b"}}" + SUFFIX
        return begun + head + (tail + head).join(jsons) + tail

    def thinking(self, text: str) -> bytes:
        begun = b"" if self._open == "thinking" else self._begin("thinking", {"thinking": "", "signature": ""})
        return begun + self._delta(text) if self._request.shows_thinking else begun

    def call(self, name: str) -> bytes:
        return self._begin("tool_use", {"id": new_id("toolu"), "name": name, "input": {}})

    def arguments(self, text: str) -> bytes:
        return self._delta(text)

    def last(self, ending: dict[str, Any], usage: Usage, num_reasoning: int) -> bytes:
        fields: dict[str, Any] = {"delta": ending, "usage": usage_of(usage, num_reasoning)}
        if self._request.chat.return_timing:
            fields["bireme"] = timing_json([usage])
        return self._end() + _event("message_delta", fields) + _STOP

    def _begin(self, kind: Kind, fields: dict[str, Any]) -> bytes:
        ended = self._end()
        self._open, self._number = kind, self._number + 1
        self._head = _DELTA % (self._number, _DELTAS[kind])
        block = {"index": self._number, "content_block": {"type": kind, **fields}}
        return ended + _event("content_block_start", block)

    def _delta(self, text: str) -> bytes:
        return self._head + encode_json(text) + b"}}" + SUFFIX

    def _end(self) -> bytes:
        kind, self._open, self._blank = self._open, "", ""
        if not kind:
            return b""
        at = {"index": self._number}
        signature = {**at, "delta": {"type": "signature_delta", "signature": SIGNATURE}}
        signed = _event("content_block_delta", signature) if kind == "thinking" else b""
        return signed + _event("content_block_stop", at)


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b" % (kind.encode(), encode_json({"type": kind, **fields})) + SUFFIX


class StreamedMessage:
    """Makes events as parts come (chat_answer.ChatOutput)."""

    def __init__(self, request: MessagesRequest, template: MessageTemplate, stream: EventStream) -> None:
        self._request, self._template, self._stream = request, template, stream
        self._has_begun = False
        self.usage: Usage | None = None  # once it has finished

    def text(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        if not self._has_begun:
            self._begin()
        self._stream.text(index, text)

    def delta(self, index: int, delta: TokenDelta) -> None:
        if not self._has_begun:
            self._begin()
        self._stream.delta(index, delta)

    def reasoning(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        self._begin()
        self._stream.chunk(self._template.thinking(text))

    def call(self, index: int, number: int, name: str, logprobs: ShownLogprobs) -> None:
        self._begin()
        self._stream.chunk(self._template.call(name))

    def arguments(self, index: int, number: int, text: str, logprobs: ShownLogprobs) -> None:
        self._stream.chunk(self._template.arguments(text))

    def finish(
        self, index: int, reason: str, logprobs: ShownLogprobs, usage: Usage, num_reasoning: int, stop_string: str
    ) -> None:
        self._begin()
        self._stream.collect()  # text that waits may open the block that ends now
        self.usage = usage
        self._stream.end(self._template.last(ending(self._request, reason, stop_string, usage), usage, num_reasoning))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._stream.chunk(self._template.start())
