"""Answers of /v1/messages through Anthropic's client's own models, as strictly as these can.

The client takes two seconds to import: not in each process that collects tests.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pydantic

from tests.openai.text.strict import _extras as extras

PING = {"type": "ping"}


def message_of(data: bytes) -> Any:
    """Return the message; every field must be in the published schema, with its type."""
    from anthropic.types import Message

    message = Message.model_validate_json(data, strict=True)
    assert not list(extras(message)), list(extras(message))
    return message


def error_of(data: bytes) -> Any:
    """Return the error; the client has no model of what a proxy sends, `request_too_large`."""
    from anthropic.types.shared.error_response import ErrorResponse

    error = ErrorResponse.model_validate_json(data, strict=True)
    assert error.request_id and not list(extras(error))
    return error.error


@functools.cache
def _event_type() -> pydantic.TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent

    return pydantic.TypeAdapter(RawMessageStreamEvent)


def events_of(data: bytes) -> list[Any]:
    """Return a stream's events, without pings; they must be framed and of the published types."""
    events = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, _, body = frame.partition("\ndata: ")
        assert name == f"event: {json.loads(body)['type']}", frame
        if json.loads(body) == PING:
            continue
        event = _event_type().validate_json(body, strict=True)
        assert not list(extras(event)), list(extras(event))
        events.append(event)
    return events


def whole_of(events: list[Any]) -> dict[str, Any]:
    """Return the message that the events tell; they must come in their order, block after block."""
    first, *rest = events
    message = first.message.model_dump(exclude_unset=True, by_alias=True)
    assert (first.type, message["content"], message["stop_reason"]) == ("message_start", [], None)
    last, stop = rest[-2:]
    assert (last.type, stop.type) == ("message_delta", "message_stop")
    is_open = False
    for event in rest[:-2]:
        if event.type == "content_block_start":
            assert not is_open and event.index == len(message["content"])
            block = event.content_block.model_dump(exclude_unset=True, by_alias=True)
            message["content"].append(block)
            partial = ""
        assert event.index == len(message["content"]) - 1
        is_open = event.type != "content_block_stop"
        if event.type == "content_block_delta":
            delta = event.delta.model_dump()
            if (kind := delta.pop("type")) == "input_json_delta":
                partial += delta["partial_json"]
            else:
                name = kind.removesuffix("_delta")
                block[name] += delta[name]
        elif not is_open and block["type"] == "tool_use":
            block["input"] = json.loads(partial or "{}")
    assert not is_open
    message |= last.delta.model_dump(exclude_unset=True, by_alias=True)
    message["usage"] |= last.usage.model_dump(exclude_unset=True, by_alias=True)
    message_of(json.dumps(message).encode())
    return message
