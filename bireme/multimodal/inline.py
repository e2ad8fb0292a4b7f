"""Pictures that come with the request, as data: URLs. Sizes are checked before anything is decoded."""

from __future__ import annotations

import base64
import binascii
import re

from bireme.errors import RequestError
from bireme.multimodal.budget import PictureBudget

_HEADER = re.compile(r"data:([a-z0-9.+/-]{0,64})((?:;[a-z0-9_.=-]{1,64}){0,4}),", re.IGNORECASE)


def decode_data_url(text: str, budget: PictureBudget) -> bytes:
    """Return the bytes of a base64 data: URL; the caller counts them. Raises RequestError."""
    header = _HEADER.match(text, 0, 512)
    if not header or not header.group(2).lower().endswith(";base64"):
        raise RequestError("not a data: URL of the form data:image/png;base64,...")
    if header.group(1) and not header.group(1).lower().startswith("image/"):
        raise RequestError("the data: URL's media type is not image/...; send PNG, JPEG, WebP or GIF")
    budget.check((len(text) - header.end()) // 4 * 3 - 2)
    try:
        return base64.b64decode(text[header.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("the data: URL is not valid base64") from None
