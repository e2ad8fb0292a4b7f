"""A result as an HTTP reply: its type, its length, and parts of it for players that seek."""

from __future__ import annotations

import asyncio
import re

from bireme.errors import NotFoundError
from bireme.openai.http.call import Call, Header
from bireme.openai.http.error_replies import HttpError
from bireme.video.files import FileStore, StoredFile

_RANGE = re.compile(rb"bytes=(\d{0,18})-(\d{0,18})")


class Files:
    """GET /files/{name}: the name gives the right to read the file."""

    def __init__(self, stores: list[FileStore], prefix: str) -> None:
        self._stores, self._prefix = stores, prefix

    async def get(self, call: Call) -> None:
        name = call.path[len(self._prefix) :]
        for store in self._stores:
            try:
                file = await asyncio.to_thread(store.find, name)
            except NotFoundError:
                continue
            await send_file(call, file)
            return
        raise NotFoundError("no such file; results are removed when they are old")


async def send_file(call: Call, file: StoredFile) -> None:
    """Answer with the file, or the part of it that a Range header asks for."""
    headers: tuple[Header, ...] = (
        (b"content-type", file.media_type.encode()),
        (b"accept-ranges", b"bytes"),
        (b"cache-control", b"private, max-age=3600"),
        (b"x-content-type-options", b"nosniff"),
        (b"content-disposition", b'inline; filename="' + file.name.encode() + b'"'),
    )
    try:
        data = await asyncio.to_thread(file.path.read_bytes)
    except OSError:
        raise NotFoundError("no such file; results are removed when they are old") from None
    part = _part(call.header(b"range"), len(data))
    if part is None:
        await call.reply(200, data, *headers)
        return
    start, end = part
    span = f"bytes {start}-{end - 1}/{len(data)}".encode()
    await call.reply(206, data[start:end], *headers, (b"content-range", span))


def _part(header: bytes, size: int) -> tuple[int, int] | None:
    """Return the requested slice; None: everything, also for several ranges."""
    match = _RANGE.fullmatch(header)
    if match is None or not (match[1] or match[2]):
        return None
    if match[1]:
        start, end = int(match[1]), min(size, int(match[2]) + 1) if match[2] else size
    else:
        start, end = max(0, size - int(match[2])), size
    if start >= end:
        span = (b"content-range", f"bytes */{size}".encode())
        raise HttpError(416, f"range: outside of the file's {size} bytes", code="invalid_range", headers=(span,))
    return start, end
