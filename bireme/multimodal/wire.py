"""Messages about the pictures of a request, between pipelines, stages and engines.

A pipeline sends an `EncodeRequest` to the worker that has the vision tower and gets, for each picture, its hash, its
number of tokens and *handles*. A handle names embeddings that wait there under a lease, for one fetch; it is signed, so
clients can carry it but not make it. The request for prefill or decode then says, as `multimodal`, where in the
expanded prompt each picture stands, with a handle for each that is to be computed.

    encode answer                msgpack, in Finish.encoded
    multimodal                   JSON (the tensor of that name), EngineRequest.multimodal
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal

import msgspec

from bireme import disagg
from bireme.errors import RequestError
from bireme.messages import MALFORMED

MAX_ITEMS = 4096  # no key: the highest media.max_images
MAX_MULTIMODAL_BYTES = 4 << 20  # no key: 1 KiB for each of so many items
Grid = tuple[int, int, int]  # patches: time, height, width


class EmbeddingHandle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Embeddings that wait under a lease in the process that made them."""

    v: int = 1
    worker: str  # its transfer's name in discovery
    life: int
    lease_id: int
    generation: int
    num_tokens: int
    hash: str
    grid: Grid | None = None


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One picture in an expanded prompt: tokens [position, position + num_tokens)."""

    kind: Literal["image"] = "image"
    hash: str  # hex, of content, model and processor; equal pictures, equal hash
    num_tokens: int
    position: int
    grid: Grid | None = None  # models with positions in two dimensions
    handle: str | None = None  # signed; None: its KV comes from prefill


class Multimodal(msgspec.Struct, frozen=True, kw_only=True):
    v: int = 1
    items: tuple[MediaItem, ...]


class OpenedItem(msgspec.Struct, frozen=True):
    """A MediaItem whose handle has been checked and opened."""

    hash: str
    num_tokens: int
    position: int
    grid: Grid | None
    handle: EmbeddingHandle | None


class Encoded(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One picture, encoded."""

    hash: str
    num_tokens: int
    hidden_size: int
    grid: Grid | None = None
    handles: tuple[str, ...] = ()  # signed


class EncodeAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    v: int = 1
    pictures: tuple[Encoded, ...]
    embeddings: bytes = b""  # safetensors, where they were asked for: tensors image_0, image_1, ...


_json = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode
_decode_multimodal = msgspec.json.Decoder(Multimodal).decode
_decode_handle = msgspec.json.Decoder(EmbeddingHandle).decode
_decode_answer = msgspec.msgpack.Decoder(EncodeAnswer).decode
_decode_answer_json = msgspec.json.Decoder(EncodeAnswer).decode


def encode_multimodal(items: tuple[MediaItem, ...]) -> bytes:
    return _json(Multimodal(items=items))


def encode_answer(answer: EncodeAnswer) -> bytes:
    return _pack(answer)


def decode_answer(blob: bytes) -> EncodeAnswer:
    return _decode_answer(blob)


def decode_answer_json(blob: bytes) -> EncodeAnswer:
    return _decode_answer_json(blob)


def seal_handle(handle: EmbeddingHandle, key: bytes) -> str:
    return disagg.sign(_json(handle), key, disagg.EMBEDDINGS).decode("ascii")


def open_handle(text: str, key: bytes) -> EmbeddingHandle:
    """Check the signature and decode. Raises RequestError."""
    payload = disagg.verify("multimodal: handle", text.encode(), key, disagg.EMBEDDINGS, "encoder")
    try:
        return _decode_handle(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"multimodal: handle: {error}") from error


def peek_handle(text: str) -> EmbeddingHandle:
    """Decode without checking the signature: lease ids can't be guessed. Raises RequestError."""
    try:
        return _decode_handle(base64.urlsafe_b64decode(text.partition(".")[0]))
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"handle: {error}") from error


def open_multimodal(blob: bytes, key: bytes) -> tuple[OpenedItem, ...]:
    """Decode `multimodal` and open its handles, in the order of positions. Raises RequestError."""
    if len(blob) > MAX_MULTIMODAL_BYTES:
        raise RequestError(f"multimodal: {len(blob)} bytes; the limit is {MAX_MULTIMODAL_BYTES}")
    try:
        request = _decode_multimodal(blob)
    except MALFORMED as error:
        raise RequestError(f"multimodal: {str(error)[:200]}") from error
    if request.v != 1:
        raise RequestError(f"multimodal: version {request.v}; this build reads version 1")
    if len(request.items) > MAX_ITEMS:
        raise RequestError(f"multimodal: {len(request.items)} items; at most {MAX_ITEMS}")
    opened = [_open_item(at, item, key) for at, item in enumerate(request.items)]
    return tuple(sorted(opened, key=lambda item: item.position))


def identity_of(items: tuple[OpenedItem, ...]) -> bytes:
    """Return bytes that stand for the pictures and their places."""
    return b"".join(f"{item.position} {item.num_tokens} {item.grid} {item.hash}\n".encode() for item in items)


def _open_item(at: int, item: MediaItem, key: bytes) -> OpenedItem:
    where = f"multimodal.items[{at}]"
    if len(item.hash) != 64 or not set(item.hash) <= set("0123456789abcdef"):
        raise RequestError(f"{where}.hash: 64 hexadecimal digits are needed; send what the encoder returned")
    if item.num_tokens < 1 or item.position < 0:
        raise RequestError(f"{where}: {item.num_tokens} tokens at {item.position}; at least 1 token, at 0 or later")
    handle = open_handle(item.handle, key) if item.handle is not None else None
    if handle is not None and (handle.hash, handle.num_tokens, handle.grid) != (item.hash, item.num_tokens, item.grid):
        raise RequestError(f"{where}.handle: it belongs to another picture; send what the encoder returned")
    return OpenedItem(item.hash, item.num_tokens, item.position, item.grid, handle)
