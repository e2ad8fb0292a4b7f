"""A server on loopback that behaves as badly as told, and pictures to serve."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

for module in ("aiohttp", "PIL", "blake3"):
    pytest.importorskip(module)


@pytest.fixture
def png() -> Callable[..., bytes]:
    """Return a function: mode, size, color -> an encoded picture."""
    from PIL import Image

    def make(mode: str = "RGB", size: tuple[int, int] = (4, 3), color: Any = "red", kind: str = "PNG") -> bytes:
        file = io.BytesIO()
        Image.new(mode, size, color).save(file, kind)
        return file.getvalue()

    return make


Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class MediaServer:
    """Serves `answer(path, writer)`; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[str] = []  # whole heads
        self.answers: dict[str, Answer] = {}
        self.port = 0

    def reply(self, path: str, body: bytes = b"", status: str = "200 OK", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status}"] + [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if not {"Content_Length", "Transfer_Encoding"} & headers.keys():
            lines.append(f"Content-Length: {len(body)}")

        async def answer(_: str, writer: asyncio.StreamWriter) -> None:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)

        self.answers[path] = answer

    def redirect(self, path: str, location: str, status: str = "302 Found") -> None:
        self.reply(path, status=status, Location=location)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            await self.answers[head.split()[1]](head, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def media_server() -> AsyncIterator[MediaServer]:
    served = MediaServer()
    listener = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.port = listener.sockets[0].getsockname()[1]
    yield served
    listener.close()
