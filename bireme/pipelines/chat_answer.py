"""From deltas of tokens to the parts of a chat answer: content, reasoning, tool calls, finish.

A `Choice` takes the deltas of one sequence and calls its `ChatOutput`. Two answers exist: `WholeAnswer` collects one
chat.completion, `StreamedAnswer` (chat_stream.py) makes chunks as parts come.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from bireme.messages import Usage
from bireme.pipelines.chat_usage import NO_NVEXT, NvExtReply, timing_json, usage_json
from bireme.pipelines.token_logprobs import TokenTexts
from bireme.text.output import TokenDelta
from bireme.text.parsers.base import CallArguments, CallStart, Content, Event, Parser, Reasoning

ShownLogprobs = list[dict[str, Any]] | None  # OpenAI's entries, one a token
encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ResponseMeta:
    id: str
    model: str
    created: int  # unix time
    service_tier: str | None = None  # None: not shown
    reasoning_names: Sequence[str] = ("reasoning_content",)

    @classmethod
    def of(
        cls,
        model: str,
        prefix: str = "chatcmpl-",
        service_tier: str | None = None,
        reasoning_names: Sequence[str] = ("reasoning_content",),
    ) -> ResponseMeta:
        return cls(f"{prefix}{secrets.token_hex(16)}", model, int(time.time()), service_tier, reasoning_names)


class TokenIds:
    """What a request for `return_token_ids`, vLLM's field, is told beside the answer of its choices."""

    def __init__(self, n: int) -> None:
        self.prompt: list[int] = []
        self._new: list[list[int]] = [[] for _ in range(n)]

    def noting(self, index: int, output: Callable[[TokenDelta], None]) -> Callable[[TokenDelta], None]:
        """Return an output of a choice's deltas that notes their ids first."""

        def add(delta: TokenDelta) -> None:
            self._new[index] += ids_of(delta)
            output(delta)

        return add

    def take(self, index: int) -> list[int]:
        """Return a choice's ids since the last call."""
        taken, self._new[index] = self._new[index], []
        return taken


def token_ids(is_wanted: bool, n: int) -> TokenIds | None:
    return TokenIds(n) if is_wanted else None


def ids_of(delta: TokenDelta) -> list[int]:
    """Return a delta's tokens, the one that has ended the sequence among them, as vLLM does."""
    return delta.tokens if delta.stop_token_id is None else [*delta.tokens, delta.stop_token_id]


class ChatOutput(Protocol):
    """Takes the parts of an answer's choices. Must be quick and must not raise."""

    def text(self, index: int, text: str, logprobs: ShownLogprobs) -> None: ...

    def delta(self, index: int, delta: TokenDelta) -> None:
        """Take a delta whose text is not made yet: it grows until the text is asked for."""

    def reasoning(self, index: int, text: str, logprobs: ShownLogprobs) -> None: ...

    def call(self, index: int, number: int, name: str, logprobs: ShownLogprobs) -> None: ...

    def arguments(self, index: int, number: int, text: str, logprobs: ShownLogprobs) -> None: ...

    def finish(
        self, index: int, reason: str, logprobs: ShownLogprobs, usage: Usage, num_reasoning: int, stop_string: str
    ) -> None:
        """The choice's last part; `logprobs` of tokens that belong to no other part. `stop_string`: what ended it; "":
        something else.
        """


class Choice:
    def __init__(
        self,
        index: int,
        answer: ChatOutput,
        parser: Parser | None = None,
        texts: TokenTexts | None = None,
        num_top: int = 0,
        is_parallel: bool = True,
    ) -> None:
        """`texts`: if log probabilities are wanted. `is_parallel` false: only the first call is delivered."""
        self._index, self._answer, self._parser = index, answer, parser
        self._texts, self._num_top = texts, num_top
        self._is_parallel = is_parallel
        self._logprobs: ShownLogprobs = None if texts is None else []
        self._num_reasoning = 0
        self._num_calls = 0

    def add(self, delta: TokenDelta) -> None:
        if self._texts is not None and delta.logprobs:
            assert self._logprobs is not None
            self._logprobs += [self._texts.chat_entry(entry, self._num_top) for entry in delta.logprobs]
        if self._parser is not None:
            self._parse(delta, self._parser)
        elif self._texts is None:
            self._answer.delta(self._index, delta)
        elif text := delta.text:
            self._answer.text(self._index, text, self._take_logprobs())
        if delta.finish_reason:
            self._finish(delta)

    def _parse(self, delta: TokenDelta, parser: Parser) -> None:
        if parser.is_reasoning:
            self._num_reasoning += len(delta.tokens)
        self._tell(parser.feed(delta.text))
        if delta.finish_reason:
            self._tell(parser.close(delta.finish_reason == "length"))

    def _tell(self, events: list[Event]) -> None:
        index, answer = self._index, self._answer
        for event in events:
            if isinstance(event, Content):
                answer.text(index, event.text, self._take_logprobs())
            elif isinstance(event, Reasoning):
                answer.reasoning(index, event.text, self._take_logprobs())
            elif event.index and not self._is_parallel:
                continue
            elif isinstance(event, CallStart):
                self._num_calls += 1
                answer.call(index, event.index, event.name, self._take_logprobs())
            elif isinstance(event, CallArguments):
                answer.arguments(index, event.index, event.text, self._take_logprobs())

    def _finish(self, delta: TokenDelta) -> None:
        reason = delta.finish_reason
        if self._num_calls and reason == "stop":
            reason = "tool_calls"
        usage = delta.usage or Usage()
        self._answer.finish(self._index, reason, self._take_logprobs(), usage, self._num_reasoning, delta.stop_string)

    def _take_logprobs(self) -> ShownLogprobs:
        if self._logprobs is None:
            return None
        taken, self._logprobs = self._logprobs, []
        return taken


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class _Collected:
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    logprobs: ShownLogprobs = None
    reason: str = ""
    usage: Usage = field(default_factory=Usage)
    num_reasoning: int = 0
    deltas: list[TokenDelta] = field(default_factory=list)  # text that is made at the end


class WholeAnswer:
    def __init__(
        self, heading: ResponseMeta, n: int, has_timing: bool = False, nvext: NvExtReply = NO_NVEXT,
        ids: TokenIds | None = None,
    ) -> None:  # fmt: skip
        self._heading, self._has_timing, self._nvext, self._ids = heading, has_timing, nvext, ids
        self._choices = [_Collected() for _ in range(n)]

    def text(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        self._choices[index].texts.append(text)
        self._add(index, logprobs)

    def delta(self, index: int, delta: TokenDelta) -> None:
        self._choices[index].deltas.append(delta)

    def reasoning(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        self._choices[index].thoughts.append(text)
        self._add(index, logprobs)

    def call(self, index: int, number: int, name: str, logprobs: ShownLogprobs) -> None:
        self._choices[index].calls.append((name, []))
        self._add(index, logprobs)

    def arguments(self, index: int, number: int, text: str, logprobs: ShownLogprobs) -> None:
        self._choices[index].calls[number][1].append(text)
        self._add(index, logprobs)

    def finish(
        self, index: int, reason: str, logprobs: ShownLogprobs, usage: Usage, num_reasoning: int, stop_string: str
    ) -> None:
        choice = self._choices[index]
        choice.texts += [delta.text for delta in choice.deltas]
        choice.reason, choice.usage, choice.num_reasoning = reason, usage, num_reasoning
        self._add(index, logprobs)

    @property
    def usages(self) -> list[Usage]:
        return [choice.usage for choice in self._choices]

    def json(self) -> bytes:
        """Return the chat.completion; once all choices have finished."""
        names, ids = self._heading.reasoning_names, self._ids
        choices = [_choice_json(index, choice, names) for index, choice in enumerate(self._choices)]
        body: dict[str, Any] = {
            "id": self._heading.id,
            "object": "chat.completion",
            "created": self._heading.created,
            "model": self._heading.model,
            "choices": choices,
            "usage": usage_json(self.usages, sum(choice.num_reasoning for choice in self._choices)),
        }
        if self._heading.service_tier is not None:
            body["service_tier"] = self._heading.service_tier
        if ids is not None:
            body["prompt_token_ids"] = ids.prompt
            body["choices"] = [one | {"token_ids": ids.take(index)} for index, one in enumerate(choices)]
        if self._has_timing:
            body["bireme"] = timing_json(self.usages)
        return encode_json(body | self._nvext.json(self.usages))

    def _add(self, index: int, logprobs: ShownLogprobs) -> None:
        if logprobs is not None:
            choice = self._choices[index]
            choice.logprobs = (choice.logprobs or []) + logprobs


def _choice_json(index: int, choice: _Collected, reasoning_names: Sequence[str]) -> dict[str, Any]:
    text = "".join(choice.texts)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.thoughts:
        message |= dict.fromkeys(reasoning_names, "".join(choice.thoughts))
    if choice.calls:
        message["content"] = text.strip() or None
        message["tool_calls"] = [
            {"id": call_id(), "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
            for name, arguments in choice.calls
        ]
    logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}
