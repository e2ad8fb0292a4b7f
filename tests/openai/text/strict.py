"""Answers of /v1/responses through the official client's own models, as strictly as these can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pydantic
from openai.types.responses import Response, ResponseStreamEvent

_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def response_of(data: bytes) -> Response:
    """Return the response; every field must be in the published schema, with its type."""
    response = Response.model_validate_json(data, strict=True)
    assert not list(_extras(response)), list(_extras(response))
    return response


def events_of(data: bytes, first: int = 0) -> list[Any]:
    """Return a stream's events, which must be framed, numbered from `first` on and of the published types."""
    events = []
    for frame in data.decode().split("\n\n")[:-1]:
        if frame.startswith(":"):
            continue
        name, _, body = frame.partition("\ndata: ")
        event = _EVENT.validate_json(body, strict=True)
        assert name == f"event: {event.type}" and type(event).model_fields["type"].annotation, frame
        assert not list(_extras(event)), list(_extras(event))
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(first, first + len(events)))
    return events


def whole_of(events: list[Any]) -> dict[str, Any]:
    """Return the last event's response, which must be what the events before it told."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items) and event.item.status == "in_progress"
            items[event.output_index] = {"texts": ""}
        elif event.type.endswith(".delta"):
            items[event.output_index]["texts"] += event.delta
        elif event.type.endswith(("text.done", "arguments.done")):
            told = event.arguments if event.type.endswith("arguments.done") else event.text
            assert told == items[event.output_index]["texts"]
        elif event.type == "response.output_item.done":
            items[event.output_index]["item"] = event.item.model_dump(exclude_unset=True, by_alias=True)
    last = events[-1].response.model_dump(exclude_unset=True, by_alias=True)
    assert [item["item"] for item in items.values()] == last["output"]
    return json.loads(json.dumps(last))


def _extras(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, pydantic.BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _extras(item, f"{path}[{at}]")
