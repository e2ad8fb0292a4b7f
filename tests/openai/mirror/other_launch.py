"""Another launch's frontend, as copies see it: it answers as a test says, and keeps what it was sent."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class OtherLaunch:
    """`answer`: its next answers' status, headers and body."""

    def __init__(self) -> None:
        self.answer: Callable[[], tuple[int, dict[str, str], bytes]] = lambda: (200, {}, b"{}")
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    @contextmanager
    def listening(self, pair: tuple[str, str] | None = None) -> Iterator[OtherLaunch]:
        """`pair`: certificate and key; with them it speaks https."""
        other = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                other.headers.append({name.lower(): value for name, value in self.headers.items()})
                other.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                status, headers, body = other.answer()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        if pair is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*pair)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.url = f"{'https' if pair else 'http'}://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
