"""Closed-loop load on an OpenAI chat endpoint, as a process of its own: raw sockets, quick acknowledgements.

    python -m benchmarks.load.sse_client HOST:PORT MODEL STREAMS SECONDS MAX_TOKENS

The last line is JSON: requests and tokens (as the server's usage says) of the time, TTFT and gaps in ms. TCP_QUICKACK
on each read, so that a server with Nagle's algorithm on is not charged with the client's delayed acknowledgements.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import cast

from benchmarks.load.meter import percentile

_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Tally:
    """What all streams saw inside the measured time."""

    starts_at: float
    ends_at: float
    num_requests: int = 0
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)  # mean gap of each request


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request, self._tally = request, tally
        self._tail = b""
        self._began = self._first_at = 0.0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ask()

    def _ask(self) -> None:
        self._tail, self._first_at = b"", 0.0
        self._began = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if not self._first_at and b"data: " in data:
            self._first_at = time.monotonic()
        self._tail = (self._tail + data)[-2048:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._end_request()

    def _end_request(self) -> None:
        now, tally = time.monotonic(), self._tally
        found = _USAGE.findall(self._tail)
        if not found:
            tally.errors.append(self._tail[-300:].decode(errors="replace"))
            self._transport.close()
        elif now >= tally.ends_at:
            self._transport.close()
        else:
            if self._began >= tally.starts_at:
                self._count(int(found[-1]), now)
            self._ask()

    def _count(self, num_tokens: int, now: float) -> None:
        tally = self._tally
        tally.num_requests += 1
        tally.num_tokens += num_tokens
        tally.ttft_ms.append(1000 * (self._first_at - self._began))
        if num_tokens > 1:
            tally.itl_ms.append(1000 * (now - self._first_at) / (num_tokens - 1))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def request_of(host: str, model: str, max_tokens: int, text: str, extra: dict[str, object]) -> bytes:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


async def load(
    target: str, model: str, streams: int, seconds: float, max_tokens: int, extra: dict[str, object]
) -> dict[str, object]:
    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    starts_at = time.monotonic() + min(1.0, seconds / 4)  # the first requests warm up
    tally = Tally(starts_at, starts_at + seconds)
    connections = []
    for slot in range(streams):
        request = request_of(target, model, max_tokens, f"Stream {slot}: " + "two banks of oars " * 6, extra)
        made = await loop.create_connection(functools.partial(Connection, request, tally), host, int(port))
        connections.append(made[1])
    await asyncio.wait([connection.done for connection in connections], timeout=seconds + _TIMEOUT_S)
    return {
        "requests_per_s": tally.num_requests / seconds,
        "tokens_per_s": tally.num_tokens / seconds,
        "ttft_ms_p50": percentile(sorted(tally.ttft_ms), 0.50),
        "ttft_ms_p99": percentile(sorted(tally.ttft_ms), 0.99),
        "itl_ms_p50": percentile(sorted(tally.itl_ms), 0.50),
        "itl_ms_p99": percentile(sorted(tally.itl_ms), 0.99),
        "num_hanging": sum(not connection.done.done() for connection in connections),
        "errors": tally.errors[:3],
    }


def main() -> None:
    import uvloop

    target, model, streams, seconds, max_tokens, *rest = sys.argv[1:]
    extra = json.loads(rest[0]) if rest else {}
    work = load(target, model, int(streams), float(seconds), int(max_tokens), extra)
    print(json.dumps(uvloop.run(work)))


if __name__ == "__main__":
    main()
