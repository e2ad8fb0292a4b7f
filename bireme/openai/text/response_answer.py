"""The answer of /v1/responses: output items, and the typed events that tell of them while they grow.

    response.created, response.in_progress
    output_item.added, content_part.added, output_text.delta..., output_text.done, content_part.done, output_item.done
    ... reasoning and function calls in the same way
    response.completed, .incomplete or .failed

An item ends when the next one begins, so at most one is open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from bireme.messages import Usage
from bireme.openai.http.error_replies import RateLimitError, reply_of
from bireme.openai.http.event_stream import EventStream
from bireme.openai.text.response_items import Item, Status, item_id, sealed
from bireme.pipelines.chat_answer import ResponseMeta, ShownLogprobs, call_id, encode_json
from bireme.pipelines.chat_usage import timing_json
from bireme.text.output import TokenDelta

_BAD_REQUEST, _SERVER_ERROR = 400, 500


class ResponseForm:
    """The response object, but for what its answer adds."""

    def __init__(self, heading: ResponseMeta, shown: dict[str, Any], *, has_timing: bool = False) -> None:
        """`shown`: the fields of the request that are repeated."""
        self.id, self._has_timing = heading.id, has_timing
        self._fields = {
            "id": heading.id,
            "object": "response",
            "created_at": heading.created,
            "model": heading.model,
            **shown,
        }

    def is_not_kept(self) -> None:
        """Have it say so, which responses have no field for unless they can't be kept."""
        self._fields["store"] = False

    def json(
        self, status: str, items: list[Item], usage: Usage | None = None, num_reasoning: int = 0,
        error: dict[str, Any] | None = None,
    ) -> bytes:  # fmt: skip
        fields = self._fields | {
            "status": status,
            "output": items,
            "usage": None if usage is None else _usage_json(usage, num_reasoning),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": error,
        }
        if self._has_timing and usage is not None:
            fields["bireme"] = timing_json([usage])
        return encode_json(fields)


def _usage_json(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},  # writing has no price
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def failure_json(error: BaseException) -> dict[str, Any]:
    reply = reply_of(error)
    told = msgspec.json.decode(reply.body)["error"]
    is_callers = _BAD_REQUEST <= reply.status < _SERVER_ERROR
    code = "rate_limit_exceeded" if isinstance(error, RateLimitError) else "invalid_prompt" if is_callers else None
    return {"code": code or "server_error", "message": told["message"]}


class ResponseEvents:
    """Numbers and frames the events of one answer (event_stream.TextTemplate)."""

    opening: tuple[str, ...] = ("response.created", "response.in_progress")

    def __init__(self, number: int = 0) -> None:
        self.number = number  # of the next event
        self._delta = b""  # beginning of the event of a piece of the open message's text

    def event(self, kind: str, **fields: Any) -> bytes:
        return self.framed(kind, encode_json(fields)[1:])

    def framed(self, kind: str, rest: bytes) -> bytes:
        """`rest`: the JSON of its other fields, without the brace that opens it."""
        name, number = kind.encode(), self.number
        self.number += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b\n\n' % (name, name, number, rest)

    def begin_text(self, item: str, output_index: int) -> None:
        self._delta = (
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","item_id":"%b",'
            b'"output_index":%d,"content_index":0,"logprobs":[],"delta":' % (item.encode(), output_index)
        )

    def text(self, index: int, text: str) -> bytes:
        return self.texts(index, [encode_json(text)])

    def texts(self, index: int, jsons: Iterable[bytes]) -> bytes:
        head, number, parts = self._delta, self.number, []
        for json in jsons:
            parts.append(b'%b%b,"sequence_number":%d}\n\n' % (head, json, number))
            number += 1
        self.number = number
        return b"".join(parts)


class ResponseAnswer:
    """Collects the items (chat_answer.ChatOutput); tells a stream of them, if there is one."""

    def __init__(
        self, form: ResponseForm, events: ResponseEvents | None = None, stream: EventStream | None = None,
        *, has_summary: bool = False, has_sealed: bool = False,
        spaced: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`has_summary`: reasoning goes into the item's summary. `has_sealed`: also into its encrypted_content.
        `spaced`: the model's name of a function -> its namespace, and its name there.
        """
        self._form, self._events, self._stream = form, events or ResponseEvents(), stream
        self._has_summary, self._has_sealed, self._spaced = has_summary, has_sealed, spaced
        self.items: list[Item] = []  # the last one may be open
        self._close: Callable[[Status], None] | None = None  # ends the open item
        self._calls: dict[int, int] = {}  # number of a call -> its item's index
        self._texts: list[str] = []  # of the open item
        self._deltas: list[TokenDelta] = []  # of the open message; their text is made at its end
        self._logprobs: ShownLogprobs = None
        self._blank: tuple[str, list[dict[str, Any]]] = ("", [])  # before any text: layout, unless text follows
        self.has_begun = False  # to tell its stream of itself
        self._status, self._json = "", b""
        self._num_reasoning = 0
        self.usage: Usage | None = None

    def json(self) -> bytes:
        self._json = self._json or self._form.json(self._status, self.items, self.usage, self._num_reasoning)
        return self._json

    def is_not_kept(self) -> None:
        """Have the response say so: it could not be kept as it was to be."""
        self._form.is_not_kept()
        self._json = b""

    @property
    def status(self) -> str:
        return self._status

    def end(self) -> None:
        """Send the last event, where there is a stream; after `finish`."""
        if self._stream is not None:
            self._stream.end(self._events.framed(f"response.{self._status}", b'"response":%b}' % self.json()))

    def failed(self, error: BaseException) -> bytes:
        if self._close is not None:
            self._end_item("incomplete")
        return self._form.json("failed", self.items, error=failure_json(error))

    def last_events(self, error: BaseException) -> bytes:
        self._begin()  # nothing but comments may have been sent
        rest = b'"response":%b}' % self.failed(error)
        return self._events.framed("response.failed", rest)

    def text(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        if self._close is None or self.items[-1]["type"] != "message":
            blank, entries = self._blank
            text, logprobs = blank + text, None if logprobs is None else entries + logprobs
            if not text.strip():
                self._blank = (text, logprobs or [])
                return
            self._blank = ("", [])
            self._open_message()
        self._texts.append(text)
        if logprobs:
            self._logprobs = (self._logprobs or []) + logprobs
            self._tell("output_text.delta", content_index=0, delta=text, logprobs=[_bare(entry) for entry in logprobs])
        elif self._stream is not None:
            self._stream.text(0, text)

    def delta(self, index: int, delta: TokenDelta) -> None:
        if self._close is None:
            self._open_message()
        self._deltas.append(delta)
        if self._stream is not None:
            self._stream.delta(0, delta)

    def reasoning(self, index: int, text: str, logprobs: ShownLogprobs) -> None:
        if self._close is None or self.items[-1]["type"] != "reasoning":
            self._open_reasoning()
        self._texts.append(text)
        if self._has_summary:
            self._tell("reasoning_summary_text.delta", summary_index=0, delta=text)
        else:
            self._tell("reasoning_text.delta", content_index=0, delta=text)

    def call(self, index: int, number: int, name: str, logprobs: ShownLogprobs) -> None:
        call = {"type": "function_call", "call_id": call_id(), "name": name, "arguments": ""}
        if name in self._spaced:
            call["namespace"], call["name"] = self._spaced[name]
        self._open(call, self._close_call)
        self._calls[number] = len(self.items) - 1

    def arguments(self, index: int, number: int, text: str, logprobs: ShownLogprobs) -> None:
        assert self._calls[number] == len(self.items) - 1, "a call's arguments come before what follows it"
        self._texts.append(text)
        self._tell("function_call_arguments.delta", delta=text)

    def finish(
        self, index: int, reason: str, logprobs: ShownLogprobs, usage: Usage, num_reasoning: int, stop_string: str
    ) -> None:
        self.usage, self._num_reasoning = usage, num_reasoning
        self._status = "incomplete" if reason == "length" else "completed"
        if not self.items:
            self._open_message()
            self._texts.append(self._blank[0])
        if self._close is not None:
            self._end_item("incomplete" if reason == "length" else "completed")

    def _open_message(self) -> None:
        self._open({"type": "message", "role": "assistant", "content": []}, self._close_message)
        if self._stream is not None:
            self._events.begin_text(self.items[-1]["id"], len(self.items) - 1)
        self._tell("content_part.added", content_index=0, part=_text_part("", None))

    def _close_message(self, status: Status) -> None:
        if self._stream is not None:
            self._stream.collect()
        text = "".join([*self._texts, *(delta.text for delta in self._deltas)])
        part = _text_part(text, self._logprobs)
        bare = [_bare(entry) for entry in self._logprobs or ()]
        self.items[-1] |= {"content": [part], "status": status}
        self._tell("output_text.done", content_index=0, text=text, logprobs=bare)
        self._tell("content_part.done", content_index=0, part=part)

    def _open_reasoning(self) -> None:
        self._open({"type": "reasoning", "summary": []}, self._close_reasoning)
        if self._has_summary:
            self._tell("reasoning_summary_part.added", summary_index=0, part={"type": "summary_text", "text": ""})
        else:
            self._tell("content_part.added", content_index=0, part={"type": "reasoning_text", "text": ""})

    def _close_reasoning(self, status: Status) -> None:
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if self._has_sealed:
            item["encrypted_content"] = sealed(text)
        if self._has_summary:
            part = {"type": "summary_text", "text": text}
            item["summary"] = [part]
            self._tell("reasoning_summary_text.done", summary_index=0, text=text)
            self._tell("reasoning_summary_part.done", summary_index=0, part=part)
        else:
            part = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            self._tell("reasoning_text.done", content_index=0, text=text)
            self._tell("content_part.done", content_index=0, part=part)

    def _close_call(self, status: Status) -> None:
        item = self.items[-1]
        item |= {"arguments": "".join(self._texts), "status": status}
        self._tell("function_call_arguments.done", arguments=item["arguments"])

    def _open(self, fields: dict[str, Any], close: Callable[[Status], None]) -> None:
        if self._close is not None:
            self._end_item("completed")
        self._blank = ("", [])
        item = {"id": item_id(fields["type"]), **fields, "status": "in_progress"}
        self.items.append(item)
        self._close = close
        if self._stream is not None:
            self._begin()
            index = len(self.items) - 1
            self._stream.chunk(self._events.event("response.output_item.added", output_index=index, item=item))

    def _begin(self) -> None:
        if self._stream is None or self.has_begun:
            return
        self.has_begun = True
        rest = b'"response":%b}' % self._form.json("in_progress", [])
        for kind in self._events.opening:
            self._stream.chunk(self._events.framed(kind, rest))

    def _end_item(self, status: Status) -> None:
        assert self._close is not None, "an item is open"
        self._close(status)
        self._close = None
        self._texts, self._deltas, self._logprobs = [], [], None
        if self._stream is not None:
            index, item = len(self.items) - 1, self.items[-1]
            self._stream.chunk(self._events.event("response.output_item.done", output_index=index, item=item))

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._stream is not None:
            index = len(self.items) - 1
            event = self._events.event(
                f"response.{kind}", item_id=self.items[index]["id"], output_index=index, **fields
            )
            self._stream.chunk(event)


def _text_part(text: str, logprobs: ShownLogprobs) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _bare(entry: dict[str, Any]) -> dict[str, Any]:
    top = [{"token": item["token"], "logprob": item["logprob"]} for item in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
