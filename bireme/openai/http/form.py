"""A multipart/form-data body as the JSON object of the same request."""

from __future__ import annotations

import json
from typing import Any

from bireme.errors import RequestError

JSON_OR_FORM = (b"application/json", b"multipart/form-data")
_NUMBERS = ("fps", "num_frames", "num_inference_steps", "seed", "guidance_scale", "n")


def json_of(body: bytes, content_type: bytes) -> bytes:
    """Return the body as JSON, from either form. Raises RequestError for a malformed form."""
    if content_type.split(b";")[0].strip().lower() != b"multipart/form-data":
        return body
    return json.dumps(_fields(body, content_type)).encode()


def _fields(body: bytes, content_type: bytes) -> dict[str, Any]:
    from python_multipart import parse_form
    from python_multipart.exceptions import FormParserError

    fields: dict[str, Any] = {}

    def on_field(field: Any) -> None:
        _add(fields, (field.field_name or b"").decode("utf-8", "replace"), field.value or b"")

    def on_file(file: Any) -> None:
        fields[(file.field_name or b"").decode("utf-8", "replace")] = None  # refused by its name, like any unknown one

    import io

    headers: Any = {"Content-Type": content_type, "Content-Length": str(len(body)).encode()}
    try:
        parse_form(headers, io.BytesIO(body), on_field, on_file)
    except (FormParserError, ValueError) as error:
        raise RequestError(f"the form can't be read ({str(error)[:200]}); send multipart/form-data") from error
    return fields


def _add(fields: dict[str, Any], name: str, value: bytes) -> None:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name[:80]}: not UTF-8 (byte {error.start}); send UTF-8 text") from error
    if name in fields:
        raise RequestError(f"{name[:80]}: sent twice; send it once")
    fields[name] = _number(name, text) if name in _NUMBERS else text


def _number(name: str, text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise RequestError(f"{name}: {text[:40]!r}; send a number")
