"""Items of a response's input, as messages of a chat template.

A model's turn comes back as several items (reasoning, message, function calls); they become one assistant message.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from bireme.config import Limits, MediaLimits
from bireme.errors import RequestError
from bireme.pipelines.json_body import convert_part
from bireme.pipelines.picture_parts import PictureCollector, show_result_pictures
from bireme.pipelines.pictures import PictureSource
from bireme.text.chat_template import Message

Item = dict[str, Any]  # as JSON
Status = Literal["in_progress", "completed", "incomplete"]
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_NO_FILES = "there are no files here; send the text, or an image_url"
_ANY_PICTURES = MediaLimits(max_images=4096)  # the most of any recipe


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    file_data: str | None = None  # of files, which are not served: known so that the refusal says so
    file_url: str | None = None
    filename: str | None = None
    annotations: list[Any] | None = None  # of an answer that returns as history
    logprobs: list[Any] | None = None


class MessageItem(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    type: str = "message"
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class CallItem(msgspec.Struct, forbid_unknown_fields=True):
    call_id: str
    name: str
    arguments: str
    type: str = ""
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None
    caller: None = None


class CallOutputItem(msgspec.Struct, forbid_unknown_fields=True):
    call_id: str
    output: str | list[InputPart]
    type: str = ""
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    namespace: str | None = None
    caller: None = None


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True):
    type: str = ""
    id: str | None = None
    summary: list[InputPart] = []
    content: list[InputPart] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


_KINDS: dict[str, type[msgspec.Struct]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def offered_name(namespace: str, name: str) -> str:
    """Return what the model knows a function of a namespace by."""
    return f"{namespace}.{name}"


def item_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"


def input_items(given: str | list[Item], where: str = "input") -> list[Item]:
    """Return the items, each with its type. Raises RequestError."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not given:
        raise RequestError(f"{where}: empty; send a text or at least one item")
    return [{**item, "type": _kind(item, f"{where}[{at}]")} for at, item in enumerate(given)]


def checked_items(given: list[Item], where: str) -> list[Item]:
    """Return items that are kept until a response goes on from them, of whichever model. Raises RequestError."""
    items = input_items(given, where)
    Conversation(Limits(), _ANY_PICTURES).add(items, where)
    return items


def _kind(item: Item, where: str) -> str:
    kind = item.get("type", "message" if "role" in item else "item_reference")
    if kind == "item_reference":
        raise RequestError(f"{where}.type: item_reference; send the item itself, or previous_response_id")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise RequestError(f"{where}.type: {str(kind)[:40]}; send {', '.join(_KINDS)}")
    return kind


def listed(items: Sequence[Item]) -> list[Item]:
    """Return checked items as lists of them show them: each with an id, a status and its content in parts."""
    return [{"id": item_id(item["type"]), "status": "completed", **_SHOWN[item["type"]](item)} for item in items]


def _shown_message(item: Item) -> Item:
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    content = [{"type": kind, "text": item["content"]}] if isinstance(item["content"], str) else item["content"]
    return {**_without_nulls(item), "content": [_shown_part(part, kind) for part in content]}


def _shown_part(part: dict[str, Any], kind: str) -> dict[str, Any]:
    part = _without_nulls(part)
    if part["type"] == "input_image":
        return {"detail": "auto", **part}
    if part["type"] == "refusal" and kind == "output_text":
        return part
    text = {"type": kind, "text": part.get("text") or part.get("refusal", "")}
    return {**text, "annotations": [], "logprobs": part.get("logprobs", [])} if kind == "output_text" else text


def _shown_output(item: Item) -> Item:
    output = item["output"]
    parts = output if isinstance(output, str) else [_shown_part(part, "input_text") for part in output]
    return {**_without_nulls(item), "output": parts}


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


_SHOWN: dict[str, Callable[[Item], Item]] = {
    "message": _shown_message,
    "function_call": _without_nulls,
    "function_call_output": _shown_output,
    "reasoning": lambda item: {"summary": [], **_without_nulls(item)},
}


def sealed(thoughts: str) -> str:
    """Return reasoning as `encrypted_content`: opaque to clients that only send it back. It is no secret."""
    return base64.urlsafe_b64encode(thoughts.encode()).decode()


def _unsealed(text: str, where: str) -> str:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise RequestError(f"{where}.encrypted_content: it is not of this server; send it as it came") from None


class Conversation:
    """Takes items, and is the messages that a chat template shows."""

    def __init__(self, limits: Limits, media: MediaLimits, instructions: str | None = None) -> None:
        self._messages: list[Message] = []
        self._limits = limits
        self._pictures = PictureCollector(media)
        self._turn: Message | None = None  # the model's, which goes on with the next item
        if instructions is not None:
            self._messages.append({"role": "system", "content": instructions})

    @property
    def messages(self) -> list[Message]:
        return show_result_pictures(self._messages) if self.pictures else self._messages

    @property
    def pictures(self) -> list[PictureSource]:
        return self._pictures.sources

    def add(self, items: Sequence[Item], where: str = "input") -> None:
        limit = self._limits.max_messages
        if len(items) > limit:
            raise RequestError(f"{where}: {len(items)} items; limits.max_messages is {limit}, send fewer")
        for at, item in enumerate(items):
            self._add(convert_part(item, _KINDS[item["type"]], f"{where}[{at}]"), f"{where}[{at}]")
        if len(self._messages) > limit:
            raise RequestError(f"{where}: {len(self._messages)} messages; limits.max_messages is {limit}, send fewer")

    def _add(self, item: msgspec.Struct, where: str) -> None:
        if isinstance(item, CallItem):
            name = item.name if item.namespace is None else offered_name(item.namespace, item.name)
            call = {"name": name, "arguments": item.arguments}
            turn = self._open_turn()
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
        elif isinstance(item, ReasoningItem):
            self._turn = None
            if thoughts := _thoughts(item, where):
                self._open_turn()["reasoning_content"] = thoughts
        elif isinstance(item, CallOutputItem):
            self._turn = None
            content = self._content(item.output, "tool", f"{where}.output")
            self._messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif isinstance(item, MessageItem):
            self._add_message(item, f"{where}.content")

    def _add_message(self, item: MessageItem, where: str) -> None:
        content = item.content
        if item.role == "assistant":
            text = content if isinstance(content, str) else _texts(content, where)
            if self._turn is not None and (self._turn["content"] or "tool_calls" in self._turn):
                self._turn = None  # it has spoken already
            self._open_turn()["content"] = text
            return
        self._turn = None
        role = "system" if item.role == "developer" else item.role
        self._messages.append({"role": role, "content": self._content(content, role, where)})

    def _content(self, content: str | list[InputPart], role: str, where: str) -> str | list[dict[str, Any]]:
        """Return a string where there is nothing but text."""
        if isinstance(content, str):
            return content
        if all(part.type != "input_image" for part in content):
            return _texts(content, where)
        return [self._part(part, role, f"{where}[{at}]") for at, part in enumerate(content)]

    def _part(self, part: InputPart, role: str, where: str) -> dict[str, Any]:
        if part.type != "input_image":
            return {"type": "text", "text": _text(part, where)}
        if role not in ("user", "tool"):
            raise RequestError(f"{where}.type: input_image; pictures go into user messages and calls' outputs")
        if part.file_id is not None:
            raise RequestError(f"{where}.file_id: {_NO_FILES}")
        self._pictures.add("image_url", {"url": part.image_url, "detail": part.detail}, where, part.type)
        return {"type": "image"}

    def _open_turn(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self._messages.append(self._turn)
        return self._turn


def _thoughts(item: ReasoningItem, where: str) -> str:
    if item.content:
        return _texts(item.content, f"{where}.content")
    if item.encrypted_content:
        return _unsealed(item.encrypted_content, where)
    return _texts(item.summary, f"{where}.summary")


def _texts(parts: list[InputPart], where: str) -> str:
    return "\n".join(_text(part, f"{where}[{at}]") for at, part in enumerate(parts))


def _text(part: InputPart, where: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type == "input_file":
        raise RequestError(f"{where}.type: input_file; {_NO_FILES}")
    if part.type not in (*_TEXTS, "refusal"):
        raise RequestError(f"{where}.type: {part.type[:40]}; send input_text here")
    if text is None:
        raise RequestError(f"{where}.{'refusal' if part.type == 'refusal' else 'text'}: missing; send a string")
    return text
