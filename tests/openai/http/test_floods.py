"""A frontend under what anybody can send who reaches its port: fields behind a body, connections that say nothing."""

from __future__ import annotations

import contextlib
import hashlib
import resource
import socket

import pytest

from tests.openai.frontend_process import frontend_server

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
)
POST = HEAD + b"\r\n"
KEY = "key-of-alice"
NUM_FIELDS_BYTES, GROWTH_BYTES = 100 << 20, 5 << 20
NUM_SILENT, NUM_OTHERS = 2000, 20
MAX_DESCRIPTORS = 600


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One with a key, and with fewer descriptors than there will be connections."""
    folder = tmp_path_factory.mktemp("floods")
    keys = folder / "keys.yaml"
    keys.write_text(f"keys: [{{name: alice, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}}}]")
    with frontend_server(
        folder, "--api-keys", str(keys), runner=("prlimit", f"--nofile=300:{MAX_DESCRIPTORS}")
    ) as running:
        yield running


def test_a_frontend_has_as_many_descriptors_as_it_may(server):
    assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE) == (MAX_DESCRIPTORS, MAX_DESCRIPTORS)


def test_fields_behind_a_body_take_no_memory(server):
    before, sent = server.rss_bytes(), 0
    fields = b"a:b\r\n" * 100_000
    with socket.create_connection(("127.0.0.1", server.port)) as client, contextlib.suppress(OSError):
        client.sendall(POST + b"2\r\n{}\r\n0\r\n")
        while sent < NUM_FIELDS_BYTES:
            client.sendall(fields)
            sent += len(fields)
    assert server.rss_bytes() - before < GROWTH_BYTES


def test_a_key_behind_the_body_is_no_key(server):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(POST + f"0\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("data", [b"", HEAD, POST], ids=["silent", "a part of a head", "no body"])
def test_connections_without_a_request_cost_no_other_client_a_refusal(server, data):
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_SILENT):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            client.sendall(data)
        assert [server.call("GET", "/health/live")[0] for _ in range(NUM_OTHERS)] == [200] * NUM_OTHERS
    assert "idle_connections_closed" in server.log.read_text()
