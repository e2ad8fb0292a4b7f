"""Content parts that are pictures: OpenAI's image_url, and image_embeds, embeddings that the client computed.

`image_url` is {"url": ...} with https:, http:, data: or, where the recipe allows it, file:. `image_embeds` is a
safetensors file: its base64, or a URL under the same rules. `detail` is accepted without effect: the model's image
processor decides the size.
"""

from __future__ import annotations

from typing import Any

from bireme.config import MediaLimits
from bireme.errors import RequestError
from bireme.messages import EncodeSource
from bireme.multimodal.urls import scheme_of
from bireme.pipelines.pictures import PictureSource
from bireme.text.chat_template import Message

PICTURE_PARTS = ("image_url", "image_embeds")
_BELOW = "The picture is in the user's message below."
_DETAILS = (None, "auto", "low", "high")


def show_result_pictures(messages: list[Message]) -> list[Message]:
    """Move pictures of tools' results behind these, into the user's next message or one of their own.

    Chat templates show none in results.
    """
    shown: list[Message] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            pictures, content = _apart(content)
            waiting += pictures
        elif waiting:
            if role == "user":
                content = [*waiting, *(content if isinstance(content, list) else [{"type": "text", "text": content}])]
            else:
                shown.append({"role": "user", "content": waiting})
            waiting = []
        shown.append({**message, "content": content})
    return [*shown, {"role": "user", "content": waiting}] if waiting else shown


def _apart(content: str | list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    if isinstance(content, str):
        return [], content
    pictures = [part for part in content if part["type"] != "text"]
    return pictures, "\n".join(part.get("text", _BELOW) for part in content)


class PictureCollector:
    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self.sources: list[PictureSource] = []

    def add(self, kind: str, value: Any, where: str, part: str = "") -> None:
        """Take one more; `part`: its type in the request, if it is another. Raises RequestError naming the field."""
        where = f"{where}.{kind}"
        self._take(_image(value, where) if kind == "image_url" else _embeds(value, where), where, part or kind)

    def add_image(self, url: str, where: str) -> None:
        """Take the picture at a URL, or in one. Raises RequestError naming the field."""
        self._take(EncodeSource("image", _encoded(url, where)), where, "image")

    def _take(self, source: EncodeSource, where: str, part: str) -> None:
        if len(self.sources) >= self._limits.max_images:
            limit = self._limits.max_images
            raise RequestError(f"{where}: more than {limit} images (media.max_images); send fewer")
        self.sources.append(PictureSource(source, where, part))


def _image(value: Any, where: str) -> EncodeSource:
    if isinstance(value, str):
        value = {"url": value}
    if not isinstance(value, dict) or not isinstance(value.get("url"), str) or not value["url"]:
        raise RequestError(
            f'{where}: missing or no object; send {{"url": "https://..." or "data:image/png;base64,..."}}'
        )
    if unknown := sorted(value.keys() - {"url", "detail"}):
        raise RequestError(f"{where}.{unknown[0][:40]}: no such field; send url and, if need be, detail")
    if value.get("detail") not in _DETAILS:
        raise RequestError(f"{where}.detail: {str(value['detail'])[:20]}; send auto, low or high")
    return EncodeSource("image", _encoded(value["url"], f"{where}.url"))


def _embeds(value: Any, where: str) -> EncodeSource:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where}: missing or no string; send a safetensors file as base64 or as a URL")
    url = value if scheme_of(value) else f"data:;base64,{value}"
    return EncodeSource("embeddings", _encoded(url, where))


def _encoded(url: str, where: str) -> bytes:
    try:
        return url.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{where}: it holds a lone surrogate; send valid Unicode") from None
