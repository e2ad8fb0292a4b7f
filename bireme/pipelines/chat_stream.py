"""A streamed chat answer: chat.completion.chunk JSON from a template, of which only the text is encoded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from bireme.messages import Usage
from bireme.pipelines.chat_answer import ResponseMeta, ShownLogprobs, TokenIds, call_id, encode_json
from bireme.pipelines.chat_usage import NO_NVEXT, NvExtReply, timing_json, usage_json
from bireme.text.output import TokenDelta


class ChunkSink(Protocol):
    """The receiver of chunks. Must be quick and must not raise."""

    def text(self, index: int, text: str) -> None:
        """A chunk with content alone, not yet made: `ChunkTemplate.text` makes it."""

    def delta(self, index: int, delta: TokenDelta) -> None:
        """Chunks with the delta's content, whose text is not made yet: the delta grows until it is asked for."""

    def chunk(self, data: bytes) -> None: ...

    def end(self) -> None:
        """No chunk follows."""


class ChunkTemplate:
    """Makes the chunks of one answer. `prefix` and `suffix` frame each (server-sent events)."""

    def __init__(
        self, heading: ResponseMeta, n: int, include_usage: bool = False, prefix: bytes = b"", suffix: bytes = b""
    ) -> None:
        self.reasoning_names = heading.reasoning_names
        tier = heading.service_tier
        head = b'%b{"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,%b"choices":[' % (
            prefix,
            heading.id.encode(),
            heading.created,
            encode_json(heading.model),
            b"" if tier is None else b'"service_tier":"%b",' % tier.encode(),
        )
        self._head = head
        self._heads = [b'%b{"index":%d,"delta":' % (head, index) for index in range(n)]
        self._texts = [start + b'{"content":' for start in self._heads]
        self._end = (b'],"usage":null}' if include_usage else b"]}") + suffix
        self._text_end = b'},"logprobs":null,"finish_reason":null}' + self._end
        self._suffix = suffix

    def text(self, index: int, text: str) -> bytes:
        return self._texts[index] + encode_json(text) + self._text_end

    def texts(self, index: int, jsons: Iterable[bytes]) -> bytes:
        """Return a chunk a piece of text, which comes as JSON."""
        head, tail = self._texts[index], self._text_end
        return head + (tail + head).join(jsons) + tail

    def delta(
        self, index: int, delta: dict[str, Any], logprobs: ShownLogprobs, reason: str | None,
        token_ids: list[int] | None = None,
    ) -> bytes:  # fmt: skip
        shown = None if logprobs is None else {"content": logprobs, "refusal": None}
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b}%b' % (
            self._heads[index],
            encode_json(delta),
            encode_json(shown),
            encode_json(reason),
            b"" if token_ids is None else b',"token_ids":%b' % encode_json(token_ids),
            self._end,
        )

    def begin(self, index: int, prompt_ids: list[int] | None = None) -> bytes:
        """Return a choice's first chunk. `prompt_ids`: it tells them as well."""
        chunk = self.delta(index, {"role": "assistant", "content": ""}, None, None)
        if not prompt_ids:
            return chunk
        head = self._heads[index]
        told = head.replace(b'"choices":[', b'"prompt_token_ids":%b,"choices":[' % encode_json(prompt_ids))
        return told + chunk[len(head) :]

    def last(self, fields: dict[str, Any]) -> bytes:
        """Return a chunk without choices, with these fields (at least one) instead."""
        return self._head + b"]," + encode_json(fields)[1:] + self._suffix


class StreamedAnswer:
    """Makes chunks as parts come (chat_answer.Answer)."""

    def __init__(
        self, template: ChunkTemplate, sink: ChunkSink, n: int, include_usage: bool = False, has_timing: bool = False,
        nvext: NvExtReply = NO_NVEXT, annotations: bytes = b"",
    ) -> None:  # fmt: skip
        """`annotations`: events before all others."""
        self._template, self._sink = template, sink
        self._include_usage, self._has_timing, self._nvext = include_usage, has_timing, nvext
        self._annotations = annotations
        self._usages: list[Usage | None] = [None] * n
        self._has_begun = [False] * n
        self._num_reasoning = 0

    @property
    def usages(self) -> list[Usage]:
        return [usage for usage in self._usages if usage is not None]

    def text(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        if not self._has_begun[index]:
            self._begin(index)
        if logprobs is None:
            self._sink.text(index, text)
        else:
            self._delta(index, {"content": text}, logprobs)

    def delta(self, index: int, delta: TokenDelta) -> None:
        if not self._has_begun[index]:
            self._begin(index)
        self._sink.delta(index, delta)

    def reasoning(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        self._delta(index, dict.fromkeys(self._template.reasoning_names, text), logprobs)

    def call(self, index: int, number: int, name: str, logprobs: ShownLogprobs) -> None:
        function = {"name": name, "arguments": ""}
        call = {"index": number, "id": call_id(), "type": "function", "function": function}
        self._delta(index, {"tool_calls": [call]}, logprobs)

    def arguments(self, index: int, number: int, text: str, logprobs: ShownLogprobs) -> None:
        self._delta(index, {"tool_calls": [{"index": number, "function": {"arguments": text}}]}, logprobs)

    def finish(
        self, index: int, reason: str, logprobs: ShownLogprobs, usage: Usage, num_reasoning: int, stop_string: str
    ) -> None:
        self._delta(index, {}, logprobs or None, reason)
        self._usages[index] = usage
        self._num_reasoning += num_reasoning
        usages = self.usages
        if len(usages) == len(self._usages):
            self._end(usages)

    def _begin(self, index: int) -> None:
        self._has_begun[index] = True
        self._sink.chunk(self._annotations + self._template.begin(index))
        self._annotations = b""

    def _delta(self, index: int, delta: dict[str, Any], logprobs: ShownLogprobs, reason: str | None = None) -> None:
        if not self._has_begun[index]:
            self._begin(index)
        self._sink.chunk(self._template.delta(index, delta, logprobs, reason))

    def _end(self, usages: list[Usage]) -> None:
        fields: dict[str, Any] = {}
        if self._include_usage:
            fields["usage"] = usage_json(usages, self._num_reasoning)
        if self._has_timing:
            fields["bireme"] = timing_json(usages)
        fields |= self._nvext.json(usages)
        if fields:
            self._sink.chunk(self._template.last(fields))
        self._sink.end()


class StreamedWithIds(StreamedAnswer):
    """Tells token ids as well (`return_token_ids`)."""

    def __init__(self, ids: TokenIds, *values: Any) -> None:
        super().__init__(*values)
        self._ids = ids

    def text(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        self._delta(index, {"content": text}, logprobs)

    def delta(self, index: int, delta: TokenDelta) -> None:
        if text := delta.text:
            self._delta(index, {"content": text}, None)

    def _begin(self, index: int) -> None:
        self._has_begun[index] = True
        self._sink.chunk(self._annotations + self._template.begin(index, self._ids.prompt))
        self._annotations, self._ids.prompt = b"", []

    def _delta(self, index: int, delta: dict[str, Any], logprobs: ShownLogprobs, reason: str | None = None) -> None:
        if not self._has_begun[index]:
            self._begin(index)
        self._sink.chunk(self._template.delta(index, delta, logprobs, reason, self._ids.take(index)))


def streamed_answer(ids: TokenIds | None, *values: Any) -> StreamedAnswer:
    return StreamedAnswer(*values) if ids is None else StreamedWithIds(ids, *values)
