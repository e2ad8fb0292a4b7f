"""Clients that send anything but requests, or leave: nobody else may notice them."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Mapping

from tritonclient.grpc import service_pb2 as pb

from benchmarks.load.http2 import DATA, END_HEADERS, HEADERS, SETTINGS, frame, request_headers
from benchmarks.load.http_streams import post

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_METHODS = ("ModelInfer", "ModelStreamInfer", "ModelReady", "NoSuchMethod")
_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v2/models/generate/generate_stream",
    "/v2/models/completion/generate",
    "/v2/models/decode/infer",
)
_READ_S = 1.0
OVERSIZE_BYTES = 40 << 20  # the frontend takes 32 MiB


def send_garbage(addresses: Mapping[str, str], rng: random.Random, count: int = 40) -> None:
    kinds = (_noise, _bad_json, _cut_short, _bad_grpc, _bad_message, _strange_values)
    for _ in range(count):
        door, data = rng.choice(kinds)(rng)
        _send(addresses[door], data)


def send_oversize(addresses: Mapping[str, str], rng: random.Random) -> None:
    """A body beyond the limit: to the frontend, and a prompt beyond limits.max_prompt_bytes to Triton."""
    text = rng.choice("xyz") * OVERSIZE_BYTES
    chat = {"model": "m", "messages": [{"role": "user", "content": text}]}
    _send(addresses["openai"], post("/v1/chat/completions", "x", chat))
    _send(addresses["http"], post("/v2/models/completion/generate", "x", {"text_input": text[: 8 << 20]}))


def leave_at_once(addresses: Mapping[str, str], rng: random.Random, count: int = 60) -> None:
    """Ask for long answers and close the connection before they have begun, or a little later."""
    body = {"text_input": "a client that leaves", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    held: list[socket.socket] = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            connection = _connect(addresses["http"])
            connection.sendall(post("/v2/models/generate/generate_stream", "x", body))
            if rng.random() < 0.5:
                connection.close()
            else:
                held.append(connection)
    for connection in held:
        connection.close()


def fill_log(address: str, count: int = 2000) -> None:
    """Requests that the frontend refuses, a line in its log each: more than all pipes on the way hold."""
    request = b"GET /v1/%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"no-such-page" * 8)
    with contextlib.suppress(OSError), _connect(address) as connection:
        for _ in range(count):
            connection.sendall(request)
            connection.recv(65536)


def hold_open(addresses: Mapping[str, str], seconds: float, count: int = 40) -> None:
    """Connections that never say what they want."""
    held = []
    for number in range(count):
        with contextlib.suppress(OSError):
            connection = _connect(addresses[("grpc", "http", "openai", "health")[number % 4]])
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n"[: 10 + number])
            held.append(connection)
    threading.Event().wait(seconds)
    for connection in held:
        connection.close()


def _noise(rng: random.Random) -> tuple[str, bytes]:
    return rng.choice(("grpc", "http", "openai", "health", "metrics")), rng.randbytes(rng.randint(1, 4000))


def _bad_json(rng: random.Random) -> tuple[str, bytes]:
    data = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "prompt": "hello"}).encode()
    at = rng.randrange(len(data))
    broken = data[:at] + rng.randbytes(rng.randint(0, 3)) + data[at + 1 :]
    head = f"POST {rng.choice(_PATHS)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(broken)}\r\n\r\n"
    return rng.choice(("http", "openai")), head.encode() + broken


def _cut_short(rng: random.Random) -> tuple[str, bytes]:
    """A body that is shorter than it says; the connection then closes."""
    head = f"POST {rng.choice(_PATHS)} HTTP/1.1\r\nHost: x\r\nContent-Length: {rng.randint(100, 1 << 40)}\r\n\r\n"
    return rng.choice(("http", "openai")), head.encode() + b'{"model": '


def _bad_grpc(rng: random.Random) -> tuple[str, bytes]:
    frames = b"".join(
        frame(rng.randrange(12), rng.randrange(256), rng.randrange(8), rng.randbytes(rng.randint(0, 60)))
        for _ in range(rng.randint(1, 8))
    )
    return "grpc", _PREFACE + frame(SETTINGS, 0, 0, b"") + frames


def _bad_message(rng: random.Random) -> tuple[str, bytes]:
    """A call in order, whose protobuf is none."""
    message = rng.randbytes(rng.randint(0, 200))
    return "grpc", _call(rng.choice(_METHODS), message)


def _strange_values(rng: random.Random) -> tuple[str, bytes]:
    """A request in order, whose tensors make no sense."""
    request = pb.ModelInferRequest(model_name=rng.choice(("generate", "decode", "prefill", "completion", "nothing")))
    request.inputs.add(name=rng.choice(("input_ids", "max_tokens", "commands", "x")), datatype="INT32", shape=[3])
    request.raw_input_contents.append(rng.randbytes(rng.choice((0, 4, 11, 12))))
    return "grpc", _call("ModelStreamInfer", request.SerializeToString())


def _call(method: str, message: bytes) -> bytes:
    headers = frame(HEADERS, END_HEADERS, 1, request_headers("x", f"/inference.GRPCInferenceService/{method}"))
    data = frame(DATA, 1, 1, b"\0" + len(message).to_bytes(4, "big") + message)
    return _PREFACE + frame(SETTINGS, 0, 0, b"") + headers + data


def _send(address: str, data: bytes) -> None:
    """Send, read a little of what comes back, leave. What goes wrong is the sender's business."""
    with contextlib.suppress(OSError), _connect(address) as connection:
        connection.sendall(data)
        connection.settimeout(_READ_S)
        connection.recv(4096)


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)
