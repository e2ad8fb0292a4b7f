"""HTTP byte by byte: requests that no client library would send, and what comes back."""

from __future__ import annotations

import re
import socket
from typing import Any

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class RawHttp:
    """One connection."""

    def __init__(self, port: int, timeout_s: float = 20.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read_until(self, text: bytes) -> bytes:
        """Return what came up to `text`, or up to the end of the connection."""
        data = b""
        while text not in data and (part := self._receive()):
            data += part
        return data

    def read(self) -> bytes:
        """Return all until the server closes, or says nothing for the time-out."""
        data = b""
        while part := self._receive():
            data += part
        return data

    def __enter__(self) -> RawHttp:
        return self

    def __exit__(self, *_: Any) -> None:
        self._socket.close()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 16)
        except (TimeoutError, ConnectionResetError):
            return b""


def post(
    body: bytes, *headers: bytes, path: bytes = b"/v1/chat/completions", host: bytes = b"Host: localhost"
) -> bytes:
    """Return a request that closes its connection; Content-Length unless the headers frame the body."""
    lines = [b"POST %b HTTP/1.1" % path, host, b"Content-Type: application/json", b"Connection: close", *headers]
    if not any(line.lower().startswith((b"content-length", b"transfer-encoding")) for line in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(filter(None, lines)) + b"\r\n\r\n" + body


def statuses(data: bytes) -> list[int]:
    """Return the status of each reply in the bytes of a connection."""
    return [int(code) for code in _STATUS.findall(data)]
