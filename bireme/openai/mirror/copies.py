"""One request once more, for another launch: what is sent, and the answer with its times.

The standard library's client follows no redirect and reads no proxy variables. Time and bytes are bounded.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bireme.discovery.live_settings import MirrorSettings
from bireme.openai.mirror.answers import RESPONSES, is_event

MARK = "x-bireme-mirrored"  # a copy is not copied again
MAX_ANSWER_BYTES = 8 << 20
_CONNECT_S = 3.0
_CHUNK_BYTES = 64 << 10
# What one side keeps for itself, or what would be done twice.
_NOT_TWICE = ("background", "previous_response_id", "conversation")


class CopyFailedError(Exception):
    """The other launch gave no answer; the text says why."""


@dataclass(frozen=True, slots=True)
class Copied:
    status: int
    body: bytes
    first_s: float  # to the first event, or the answer
    seconds: float


@dataclass(frozen=True, slots=True)
class Copy:
    path: str
    request_id: str
    body: bytes
    is_stream: bool
    must_be_same: bool  # nothing of it is left to chance


def copy_of(path: str, request_id: str, data: bytes, settings: MirrorSettings) -> Copy | None:
    """None: it can't be sent twice."""
    body: dict[str, Any] = json.loads(data)
    extensions = body.get("bireme") or {}
    if any(body.get(name) for name in _NOT_TWICE) or (extensions.get("routing") or {}).get("query_only"):
        return None
    if path == RESPONSES:
        body["store"] = False
    if settings.generation is not None:
        routing = (extensions.get("routing") or {}) | {"generation": settings.generation}
        body["bireme"] = extensions | {"routing": routing}
    must_be_same = body.get("temperature") == 0 or body.get("seed") is not None
    return Copy(path, request_id, json.dumps(body).encode(), bool(body.get("stream")), must_be_same)


class CopySender:
    """`send` on any thread; `close` ends all that are on their way."""

    def __init__(self) -> None:
        self._sockets: set[socket.socket] = set()
        self._is_closed = False

    def send(self, copy: Copy, settings: MirrorSettings, limit_s: float) -> Copied:
        """Raises CopyFailedError."""
        deadline = time.monotonic() + limit_s
        connection, open_socket = _connection(settings), None
        try:
            connection.connect()
            open_socket = connection.sock  # which the connection forgets before its answer ends
            self._sockets.add(open_socket)
            if self._is_closed:
                raise CopyFailedError("this launch ends")
            began_at = time.monotonic()
            connection.request("POST", copy.path, copy.body, _headers(copy, settings))
            return _read(connection, open_socket, copy, began_at, deadline)
        except TimeoutError:
            raise CopyFailedError(f"it did not answer within {limit_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise CopyFailedError(f"its certificate is not trusted here: {error.verify_message} (ca_file)") from None
        except (OSError, http.client.HTTPException) as error:
            raise CopyFailedError(f"it can't be reached, or hung up ({type(error).__name__})") from None
        finally:
            if open_socket is not None:
                self._sockets.discard(open_socket)
            connection.close()

    def close(self) -> None:
        self._is_closed = True
        for open_socket in list(self._sockets):
            _shut(open_socket)


def _shut(open_socket: socket.socket) -> None:
    try:
        open_socket.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        pass


def _connection(settings: MirrorSettings) -> http.client.HTTPConnection:
    """Raises CopyFailedError."""
    parts = urlsplit(settings.url)
    host, port = parts.hostname or "", parts.port
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
    try:
        trusted = ssl.create_default_context(cafile=settings.ca_file or None)
    except OSError as error:  # it was there when it was named
        raise CopyFailedError(
            f"ca_file: {settings.ca_file} can't be read as certificates here any more ({error}); put it back"
        ) from None
    return http.client.HTTPSConnection(host, port, timeout=_CONNECT_S, context=trusted)


def _headers(copy: Copy, settings: MirrorSettings) -> dict[str, str]:
    headers = {"content-type": "application/json", "x-request-id": copy.request_id, MARK: "1"}
    if settings.key_file:
        headers["authorization"] = f"Bearer {Path(settings.key_file).read_text().strip()}"
    return headers


def _read(
    connection: http.client.HTTPConnection, open_socket: socket.socket, copy: Copy, began_at: float, deadline: float
) -> Copied:
    _wait_until(open_socket, deadline)
    response = connection.getresponse()
    body, first_s = bytearray(), 0.0
    while True:
        _wait_until(open_socket, deadline)
        data = response.read1(_CHUNK_BYTES)
        now = time.monotonic()
        if not data:
            if response.length:  # so many bytes are missing
                raise http.client.IncompleteRead(b"", response.length)
            return Copied(response.status, bytes(body), first_s or now - began_at, now - began_at)
        body += data
        if not first_s and (not copy.is_stream or is_event(data)):
            first_s = now - began_at
        if len(body) > MAX_ANSWER_BYTES:
            raise CopyFailedError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")


def _wait_until(open_socket: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    open_socket.settimeout(left_s)
