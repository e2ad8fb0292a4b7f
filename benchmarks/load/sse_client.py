"""Closed-loop load on an OpenAI endpoint, as a process of its own: raw sockets, quick acknowledgements.

    python -m benchmarks.load.sse_client --target 127.0.0.1:9000 --model tiny-chat --streams 64 --max-tokens 32

Events go to stdout, one JSON object a line: measuring, measured, and last the report with requests and tokens (as the
server's usage says) of the time, TTFT and mean gaps in ms. TCP_QUICKACK on each read, so that a server with Nagle's
algorithm on is not charged with the client's delayed acknowledgements. A byte is looked at twice at most: the client
shares its cores with what it measures. Answers are not checked, soak.py does that.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import re
import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from benchmarks.load.meter import percentile

_USAGE = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')
_TIMEOUT_S = 60.0
NUMBER = b"#NUMBER#"
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",  # not kept
    "kept": "/v1/responses",
    "messages": "/v1/messages",
}


@dataclass(slots=True)
class Tally:
    """What all streams saw inside the measured time."""

    starts_at: float
    ends_at: float
    num_requests: float = 0.0
    num_tokens: float = 0.0
    errors: list[str] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)  # mean gap of each request

    def count(self, began_at: float, first_at: float, ended_at: float, num_tokens: int) -> None:
        """Take a request that has ended. One that reaches over an end of the time counts with its part inside:
        else long answers would be missing at both ends.
        """
        self.num_requests += self._share(began_at, ended_at)
        self.num_tokens += num_tokens * self._share(first_at, ended_at)
        if self.starts_at <= began_at < self.ends_at:
            self.ttft_ms.append(1000 * (first_at - began_at))
            if num_tokens > 1:
                self.itl_ms.append(1000 * (ended_at - first_at) / (num_tokens - 1))

    def _share(self, begin: float, end: float) -> float:
        if end <= begin:  # all of it came at once
            return float(self.starts_at <= end < self.ends_at)
        return max(0.0, min(end, self.ends_at) - max(begin, self.starts_at)) / (end - begin)


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self, request: bytes, tally: Tally, pause_s: float = 0.0) -> None:
        """`request` has NUMBER in it, which each request replaces by a number of its own. `pause_s`: between two, the
        mean of an exponential distribution.
        """
        self._head, self._rest = request.split(NUMBER)
        self._tally, self._pause_s, self._num_asked = tally, pause_s, 0
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
        self._num_asked += 1
        self._transport.writelines((self._head, b"%0*d" % (len(NUMBER), self._num_asked), self._rest))

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
            return
        tally.count(self._began, self._first_at, now, int(found[-1]))
        pause_s = random.expovariate(1 / self._pause_s) if self._pause_s else 0.0
        if now + pause_s >= tally.ends_at:
            self._transport.close()
        elif pause_s:
            asyncio.get_running_loop().call_later(pause_s, self._ask)
        else:
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def request_of(
    host: str, model: str, max_tokens: int, text: str, extra: dict[str, Any], system: str = "", api: str = "chat"
) -> bytes:
    messages = [{"role": "system", "content": system}] if system else []
    turns = [*messages, {"role": "user", "content": text}]
    fields: dict[str, Any]
    if api in ("responses", "kept"):
        fields = {"input": turns, "max_output_tokens": max_tokens, "store": api == "kept"}
    elif api == "messages":
        fields = {"messages": turns, "max_tokens": max_tokens}
    else:
        fields = {"messages": turns, "max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    data = json.dumps({"model": model, "stream": True, **fields, **extra}).encode()
    head = f"POST {PATHS[api]} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


async def load(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load for the time asked for and return the report's fields."""
    starts_at = time.monotonic() + arguments.warmup_s
    tally = Tally(starts_at, starts_at + arguments.seconds)
    events = asyncio.create_task(say_times(tally))
    connections = [await connect(arguments, slot, tally) for slot in range(arguments.streams)]
    limit_s = arguments.warmup_s + arguments.seconds + _TIMEOUT_S
    await asyncio.wait([connection.done for connection in connections], timeout=limit_s)
    await events
    return report(tally, arguments.seconds) | {"num_hanging": sum(not item.done.done() for item in connections)}


async def connect(arguments: argparse.Namespace, slot: int, tally: Tally) -> Connection:
    host, _, port = arguments.target.rpartition(":")
    text = f"Stream {slot}: " + "two banks of oars " * 6 + NUMBER.decode()
    system = arguments.system_file.read_text() if arguments.system_file else ""
    request = request_of(
        arguments.target, arguments.model, arguments.max_tokens, text, arguments.extra, system, arguments.api
    )
    loop = asyncio.get_running_loop()
    make = functools.partial(Connection, request, tally, arguments.pause_s)
    return (await loop.create_connection(make, host, int(port)))[1]


async def say_times(tally: Tally) -> None:
    await asyncio.sleep(tally.starts_at - time.monotonic())
    say("measuring")
    await asyncio.sleep(tally.ends_at - time.monotonic())
    say("measured")


def report(tally: Tally, seconds: float) -> dict[str, Any]:
    ttft, itl = sorted(tally.ttft_ms), sorted(tally.itl_ms)
    return {
        "requests_per_s": tally.num_requests / seconds,
        "tokens_per_s": tally.num_tokens / seconds,
        "ttft_mean_ms": statistics.fmean(ttft) if ttft else None,
        "ttft_p50_ms": percentile(ttft, 0.50),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "itl_p50_ms": percentile(itl, 0.50),
        "itl_p99_ms": percentile(itl, 0.99),
        "errors": tally.errors[:3],
    }


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    import uvloop

    say("report", **uvloop.run(load(parse_arguments())))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load.sse_client", description="Load an endpoint.")
    parser.add_argument("--target", default="127.0.0.1:9000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api", choices=list(PATHS), default="chat")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warmup-s", type=float, default=1.5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--pause-s", type=float, default=0.0, help="of a stream between two requests, on average")
    parser.add_argument("--system-file", type=Path, help="text that every prompt begins with")
    parser.add_argument("--extra", type=json.loads, default={}, metavar="JSON", help="further fields of each request")
    return parser.parse_args()


if __name__ == "__main__":
    main()
