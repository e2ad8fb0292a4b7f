"""What an answer of the text APIs says, as one mapping for whole answers and streams, so that two can be compared.

Ids, times and usage are left out: they differ with every answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses",
)  # fmt: skip
_EVENT = b"data:"
_DONE = b"[DONE]"
_IDS = "token_ids"


@dataclass(slots=True)
class Said:
    """`values`: by place in the answer, such as choices[0].content."""

    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # why it is no whole answer

    def add(self, place: str, piece: Any) -> None:
        """Append a piece of text or of token ids; what is empty says nothing."""
        if piece and isinstance(piece, (str, list)):
            known = self.values.get(place)
            self.values[place] = piece if known is None else known + piece


def read_answer(path: str, body: bytes) -> Said:
    """Read an answer with status 200."""
    said, take = Said(), _READERS[path]
    try:
        for document in _documents(body):
            take(said, document)
    except (ValueError, TypeError, AttributeError, KeyError):
        said.error = "it is no answer of this API"
    if not said.error and not any(place.endswith(_ENDS) for place in said.values):
        said.error = "it has no end"
    return said


def is_event(data: bytes) -> bool:
    """Return whether there is more in it than comments."""
    return _EVENT in data


def difference(old: Said, new: Said) -> str:
    """Return where two answers differ, without their words; "": nowhere.

    Token ids count where both have them.
    """
    for place in dict.fromkeys((*old.values, *new.values)):
        first, second = old.values.get(place), new.values.get(place)
        if first == second or (place.endswith(_IDS) and (first is None or second is None)):
            continue
        if first is None or second is None:
            return f"{place}: only the {'old' if second is None else 'new'} answer has it"
        return f"{place}: they differ at {_first_difference(first, second)} of {len(first)} and {len(second)}"
    return ""


def _first_difference(first: Any, second: Any) -> int:
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
                min(len(first), len(second)))  # fmt: skip


def _documents(body: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the answer, or its events. Raises ValueError."""
    if body.lstrip()[:1] == b"{":
        yield json.loads(body)
        return
    for line in body.splitlines():
        if line.startswith(_EVENT) and (data := line[len(_EVENT) :].strip()) != _DONE:
            yield json.loads(data)


def _take_chat(said: Said, document: Mapping[str, Any]) -> None:
    if "error" in document:
        said.error = _error(document["error"])
        return
    for choice in document.get("choices", ()):
        place = f"choices[{choice.get('index', 0)}]"
        message = choice.get("message") or choice.get("delta") or {}
        said.add(f"{place}.text", choice.get("text"))
        said.add(f"{place}.{_IDS}", choice.get(_IDS))
        said.add(f"{place}.finish_reason", choice.get("finish_reason"))
        for name, piece in message.items():
            if name not in ("role", "tool_calls"):
                said.add(f"{place}.{name}", piece)
        for at, call in enumerate(message.get("tool_calls") or ()):
            function, called = call.get("function") or {}, f"{place}.tool_calls[{call.get('index', at)}]"
            said.add(f"{called}.name", function.get("name"))
            said.add(f"{called}.arguments", function.get("arguments"))


def _take_message(said: Said, document: Mapping[str, Any]) -> None:
    match document.get("type"):
        case "error":
            said.error = _error(document.get("error"))
        case "message":
            for at, block in enumerate(document["content"]):
                _add_block(said, f"content[{at}]", block)
            said.add("stop_reason", document.get("stop_reason"))
        case "content_block_start":
            _add_block(said, f"content[{document['index']}]", document["content_block"])
        case "content_block_delta":
            delta, place = document["delta"], f"content[{document['index']}]"
            for name in ("text", "thinking", "partial_json"):
                said.add(f"{place}.{name}", delta.get(name))
        case "message_delta":
            said.add("stop_reason", document["delta"].get("stop_reason"))


def _add_block(said: Said, place: str, block: Mapping[str, Any]) -> None:
    for name in ("type", "name", "text", "thinking"):
        said.add(f"{place}.{name}", block.get(name))
    if block.get("input"):
        said.add(f"{place}.input", json.dumps(block["input"], sort_keys=True))


def _take_response(said: Said, document: Mapping[str, Any]) -> None:
    if document.get("object") != "response":
        if document.get("type") == "error":
            said.error = _error(document)
        elif document.get("type") in ("response.completed", "response.incomplete", "response.failed"):
            _take_response(said, document["response"])
        return
    if document.get("error"):
        said.error = _error(document["error"])
    said.add("status", document.get("status"))
    for at, item in enumerate(document.get("output", ())):
        _add_item(said, f"output[{at}]", item)


def _add_item(said: Said, place: str, item: Mapping[str, Any]) -> None:
    for name in ("type", "name", "arguments"):
        said.add(f"{place}.{name}", item.get(name))
    for kind in ("content", "summary"):
        for part in item.get(kind) or ():
            said.add(f"{place}.{kind}", part.get("text") or part.get("refusal"))


def _error(error: Any) -> str:
    """Return what kind it is; messages may have words of the prompt."""
    kind = error.get("code") or error.get("type") if isinstance(error, dict) else None
    return f"its stream ended with the error {str(kind)[:60]}"


_ENDS = ("finish_reason", "stop_reason", "status")
_READERS: Mapping[str, Callable[[Said, Mapping[str, Any]], None]] = {
    CHAT: _take_chat,
    COMPLETIONS: _take_chat,
    MESSAGES: _take_message,
    RESPONSES: _take_response,
}
MIRRORED = frozenset(_READERS)
