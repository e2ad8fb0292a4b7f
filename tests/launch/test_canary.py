"""What a canary asks a server for."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from bireme.launch.canary import probe_decode, probe_pipeline


@pytest.fixture
def server():
    """Return (address, the bodies that arrived); every request is answered."""
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{listener.server_port}", bodies
        listener.shutdown()


def test_no_canary_finds_the_kv_of_another(server):
    address, bodies = server
    results = [probe_decode(address, "decode", 5), probe_decode(address, "decode", 5), probe_pipeline(address, "m", 5)]
    assert [result.error for result in results] == ["", "", ""]
    assert [body["max_tokens"] for body in bodies] == [1, 1, 1]
    assert len({body["cache_salt"] for body in bodies} - {""}) == 3
