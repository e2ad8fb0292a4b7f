"""The ports that a launch opened, and whether each still answers something: a stopped process takes connections."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable

INTERVAL_S = 1.0
_TIMEOUT_S = 1.5
_SILENT_S = 3.0  # without an answer: a busy machine may be late with one
# What an HTTP/2 client begins with, an empty SETTINGS frame included; a gRPC server answers with its own SETTINGS.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEAD_BYTES, _SETTINGS = 9, 4

Ask = Callable[[float], None]  # with a time limit in seconds; raises OSError or HTTPException


class Door:
    """One port. `turn` every INTERVAL_S, on one thread."""

    def __init__(self, name: str, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.answers = 0
        self._ask = ask
        self._clock = clock
        self._answered_at = clock()
        self._error = "it has not answered yet"
        self._is_refused = True

    def turn(self) -> None:
        try:
            self._ask(_TIMEOUT_S)
        except (OSError, http.client.HTTPException) as error:
            self._error = str(error) or type(error).__name__
            self._is_refused = isinstance(error, ConnectionError)
        else:
            self.answers += 1
            self._error, self._is_refused, self._answered_at = "", False, self._clock()

    @property
    def problem(self) -> str:
        """Why nothing answers; empty while it does."""
        silent_s = self._clock() - self._answered_at
        if self._is_refused:
            return self._error
        return f"no answer for {silent_s:.0f} s{self._error and ': '}{self._error}" if silent_s > _SILENT_S else ""


def ask_http(address: str, path: str, has_tls: bool = False) -> Ask:
    def ask(timeout_s: float) -> None:
        get(address, path, timeout_s, has_tls)

    return ask


def connect(address: str, timeout_s: float, has_tls: bool) -> http.client.HTTPConnection:
    """Whatever its certificate: an expired one is no hang."""
    if not has_tls:
        return http.client.HTTPConnection(address, timeout=timeout_s)
    return http.client.HTTPSConnection(address, timeout=timeout_s, context=ssl._create_unverified_context())


def get(address: str, path: str, timeout_s: float, has_tls: bool = False, key: str = "") -> bytes:
    """`key`: the launch's, where the port asks for keys. Raises OSError, HTTPException."""
    connection = connect(address, timeout_s, has_tls)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"HTTP {response.status} from {path}")
        return body
    finally:
        connection.close()


def ask_grpc(address: str, tls: ssl.SSLContext | None = None) -> Ask:
    """A gRPC server sends its HTTP/2 settings before any call."""
    host, _, port = address.rpartition(":")

    def ask(timeout_s: float) -> None:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((host.strip("[]"), int(port)), timeout_s))
            if tls is not None:
                connection = stack.enter_context(tls.wrap_socket(connection))
            connection.sendall(_HTTP2_HELLO)
            head = b""
            while len(head) < _FRAME_HEAD_BYTES:
                part = connection.recv(_FRAME_HEAD_BYTES - len(head))
                if not part:
                    raise ConnectionResetError("the connection was closed at once")
                head += part
            if head[3] != _SETTINGS:
                raise http.client.HTTPException(f"no HTTP/2 settings but {head!r}")

    return ask
