"""The processes that serve one frontend's port together: this one's number, and what it may ask the others.

The kernel gives each new connection to one of them. They share nothing; any of them may be asked for what is all
processes' matter, so each answers the others' questions over a Unix socket in their common folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bireme.launch.ports import resolve
from bireme.metrics import MetricDelta

_TIMEOUT_S = 1.0
_MAX_QUESTION_BYTES = 4096
TOTALS = "totals"  # of metrics
Answer = Callable[[str], bytes]  # what the question is about -> the answer; b"": nothing is known
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(MetricDelta).decode


@dataclass(frozen=True, slots=True)
class Member:
    """One of `count` processes; their sockets lie in `folder`, which its owner alone can enter."""

    number: int  # from 0
    count: int
    folder: Path

    @classmethod
    def parse(cls, text: str) -> Member:
        number, count, folder = text.split("/", 2)
        return cls(int(number), int(count), Path("/", folder))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}/{str(self.folder).lstrip('/')}"

    @property
    def has_served(self) -> bool:
        """Whether its process takes, or took, connections."""
        return self._served.exists()

    def note_serving(self) -> None:
        self._served.touch()

    @property
    def _served(self) -> Path:
        return self.folder / f"{self.number}.served"

    def share_of(self, limit: int | None) -> int | None:
        """Return this process's part of a limit for all of them, at least 1."""
        return None if limit is None else max(1, math.ceil(limit / self.count))

    async def tell(
        self, totals: Callable[[], MetricDelta], answers: Mapping[str, Answer] | None = None
    ) -> asyncio.AbstractServer:
        """Answer the others' questions until the server is closed; `answers` by the question's first word."""
        known: dict[str, Answer] = {TOTALS: lambda _: _encode(totals()), **(answers or {})}

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(_TIMEOUT_S):
                    asked = await reader.read(_MAX_QUESTION_BYTES)
                name, _, about = asked.decode().partition(" ")
                if name in known:
                    writer.write(known[name](about))
                await writer.drain()
            writer.close()

        path = self._path(self.number)
        path.unlink(missing_ok=True)  # of one that died
        return await asyncio.start_unix_server(answer, path)

    async def ask_totals(self) -> list[MetricDelta]:
        """Return the totals of the others; without those that do not answer."""
        found: list[MetricDelta] = []
        for answer in await self.ask(TOTALS):
            with contextlib.suppress(msgspec.MsgspecError):
                found.append(_decode(answer))
        return found

    async def ask(self, question: str) -> list[bytes]:
        """Return the answers of the others; without those that do not answer, or know nothing."""
        numbers = [number for number in range(self.count) if number != self.number]
        answers = await asyncio.gather(*(self._ask(number, question.encode()) for number in numbers))
        return [answer for answer in answers if answer]

    async def _ask(self, number: int, question: bytes) -> bytes:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await _exchange(self._path(number), question)
        except (TimeoutError, OSError):
            return b""

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.sock"


async def _exchange(path: Path, question: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(question)
        writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


def shared_socket(host: str, port: int) -> socket.socket:
    """Return a socket of a port that other processes of this user may share. Raises OSError."""
    family, address = resolve(host, port)
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(False)
    return listener
