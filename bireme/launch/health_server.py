"""A small HTTP endpoint for probes, apart from Triton's own, which calls a model ready whose stub has died.

`/health/live`: the launcher has not given up (else restart it). `/health/ready`: requests are served. `/metrics`: what
gateways read, where the recipe asks for it (whole_page.py). `/workers`: with discovery in Kubernetes (told_records.py).
"""

from __future__ import annotations

import http.server
import json
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from bireme.errors import BiremeError
from bireme.launch.ports import resolve

_CLIENT_S = 10.0  # for a client to send its request
_ALONE_S = 0.5  # the same, while others wait for its answer
Report = Callable[[], tuple[bool, dict[str, Any]]]
Page = Callable[[], bytes]
Records = Callable[[str, str], tuple[int, bytes, str]]  # If-None-Match, Prefer -> status, JSON, ETag


class HealthServer:
    """Answers 200 or 503; body JSON, of /metrics Prometheus' text."""

    def __init__(
        self,
        host: str,
        port: int,
        live: Report,
        ready: Report,
        page: Page | None = None,
        records: Mapping[str, Records] = MappingProxyType({}),
    ) -> None:
        """`page`: raises BiremeError while there is none. `records`: by path."""
        routes = {"/health/live": live, "/health/ready": ready, "/health": ready}
        self._server = SmallHttpServer(host, port, _handler(routes, page, records))
        self.port = self._server.port

    def start(self) -> None:
        self._server.start("health-http")

    def stop(self) -> None:
        self._server.stop()


class SmallHttpServer(http.server.ThreadingHTTPServer):
    """A thread a client; none is waited for long."""

    daemon_threads = True
    tls: ssl.SSLContext | None = None

    def __init__(self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family, address = resolve(host, port)
        super().__init__(address, handler)
        self.port: int = self.server_address[1]
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Serve on a thread of this name, until `stop`."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
            self._thread = None
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_CLIENT_S)
        if self.tls is not None:  # its handshake is the client's thread's
            request = self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread left: one client after the other, none for long
            request.settimeout(_ALONE_S)
            self.process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is no error."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError, ssl.SSLError)):
            super().handle_error(request, client_address)


def _handler(
    routes: dict[str, Report], page: Page | None, records: Mapping[str, Records]
) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        server_version = "bireme"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if page is not None and path == "/metrics":
                self._show(page)
                return
            if (tell := records.get(path)) is not None:
                status, body, etag = tell(self.headers.get("If-None-Match", ""), self.headers.get("Prefer", ""))
                self._reply(status, body, "application/json", etag)
                return
            report, known = routes.get(path), [*routes, *records, *(["/metrics"] if page is not None else [])]
            is_good, told = report() if report else (False, {"error": f"known paths: {', '.join(known)}"})
            self._reply(200 if is_good else 503 if report else 404, json.dumps(told).encode(), "application/json")

        def _show(self, page: Page) -> None:
            try:
                self._reply(200, page(), "text/plain; version=0.0.4; charset=utf-8")
            except BiremeError as error:
                self._reply(503, json.dumps({"error": str(error)}).encode(), "application/json")

        def _reply(self, status: int, payload: bytes, kind: str, etag: str = "") -> None:
            self.send_response(status)
            if etag:
                self.send_header("ETag", etag)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(payload)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *arguments: object) -> None:
            """Probes come each second."""

    return Handler
