"""What a launch tells over HTTP of its workers, and who follows that: their sealed records.

    GET /workers       of this launch, which other pods ask
    GET /workers/all   and of all others that it knows, which its own processes ask

With `If-None-Match` and `Prefer: wait=S` (RFC 7240) the answer waits for a change; 304: none came in S seconds.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading

import msgspec

from bireme.discovery.store import StoreError

OWN_PATH, ALL_PATH = "/workers", "/workers/all"
MAX_WAIT_S = 30
_TIMEOUT_S = 2.0  # to connect, and for an answer that does not wait
_MAX_BYTES = 16 << 20  # a record has about a kilobyte


class RecordPage(msgspec.Struct, frozen=True):
    workers: tuple[msgspec.Raw, ...] | None = None  # None: not known yet
    problem: str = ""  # why somebody may be missing


class PageClient:
    """Follows a launch's page. Of one thread but for `close`."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self._host, self._port, self._path = host, port, path
        self._page, self._etag = RecordPage(problem="not read yet"), ""
        self._connection: http.client.HTTPConnection | None = None
        self._closing = threading.Event()

    def page(self) -> RecordPage:
        """Return what was read last, or what there is now while that was nothing. Raises StoreError."""
        if self._page.workers is None:
            self.look(0.0)
        return self._page

    def wait(self, timeout_s: float) -> None:
        self.look(timeout_s)

    def look(self, wait_s: float) -> bool:
        """Read the page, once it changes or after `wait_s`; return whether it has changed. Raises StoreError."""
        seconds = min(MAX_WAIT_S, max(1, round(wait_s))) if wait_s and self._etag else 0
        connection = self._connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            if self._closing.is_set():
                raise StoreError("discovery is closed")
            connection.connect()
            connection.sock.settimeout(seconds + _TIMEOUT_S)
            waiting = {"If-None-Match": self._etag, "Prefer": f"wait={seconds}"} if seconds else {}
            connection.request("GET", self._path, headers=waiting)
            return self._take(connection.getresponse())
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, AttributeError) as error:
            raise StoreError(
                f"http://{self._host}:{self._port}{self._path}: {error or type(error).__name__}"
            ) from error
        finally:
            self._connection = None
            connection.close()

    def close(self) -> None:
        self._closing.set()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _take(self, response: http.client.HTTPResponse) -> bool:
        if response.status == http.HTTPStatus.NOT_MODIFIED:
            return False
        body = response.read(_MAX_BYTES + 1)
        if response.status != http.HTTPStatus.OK or len(body) > _MAX_BYTES:
            raise http.client.HTTPException(f"status {response.status}, {len(body)} bytes; a page of workers was asked")
        self._page = msgspec.json.decode(body, type=RecordPage)
        self._etag = response.getheader("ETag") or '""'
        return True
