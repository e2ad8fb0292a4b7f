"""The listener of tools/check_fabric.py and who asks it, over a socket that needs the deployment's key.

Requests are msgpack arrays [name, arguments]; answers [result, error].
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import zmq

from bireme.errors import BiremeError, ConfigError, UnavailableError
from bireme.kv.transfer.memory import zero_pages
from bireme.kv.wire.curve import curve_keys, is_ipv6, let_in_readers

PORT = 8010
CONNECT_S, ANSWER_S = 5.0, 120.0
_LOOK_MS = 200
_PIECE = struct.Struct("<QQ")  # bytes of a piece, pieces
# As much as a transfer's, so that no cache holds a piece that a transfer's cache would not.
SOURCE_BYTES, ROOM_BYTES = 128 << 20, 512 << 20
_GREETING = b"\xff"  # ZeroMQ's first byte


class Listener:
    """Answers one peer's requests at a time."""

    def __init__(self, port: int, key: bytes, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Raises ConfigError. `port` 0: a free one."""
        self._handlers, self._is_closing = handlers, threading.Event()
        self._context = zmq.Context()
        self._authenticator = let_in_readers(self._context, key)
        self._socket: Any = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.IPV6, True)  # and IPv4
        self._socket.curve_publickey, self._socket.curve_secretkey = curve_keys(key, "engine")
        self._socket.curve_server = True
        try:
            self._socket.bind(f"tcp://*:{port or '*'}")
        except zmq.ZMQError as error:
            self._end()
            raise ConfigError(f"--port {port}: can't listen there: {error}; name another") from error
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2].rstrip("\0"))

    def serve(self) -> None:
        """Answer until `close`."""
        try:
            while not self._is_closing.is_set():
                if self._socket.poll(_LOOK_MS):
                    self._socket.send(self._answer(self._socket.recv()))
        finally:
            self._end()

    def close(self) -> None:
        """From any thread; `serve` returns."""
        self._is_closing.set()

    def _answer(self, request: bytes) -> bytes:
        try:
            name, arguments = msgspec.msgpack.decode(request)
            answer = [self._handlers[name](**arguments), ""]
        except BiremeError as error:
            answer = [None, str(error)]
        except Exception as error:  # of a peer of another version, or a measurement that broke off
            answer = [None, f"{type(error).__name__}: {error}"]
        return msgspec.msgpack.encode(answer)

    def _end(self) -> None:
        self._socket.close(linger=0)
        self._authenticator.stop()
        self._context.term()


class FarHost:
    """The other host's listener."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        """Raises ConfigError with the remedy."""
        self.host = host
        self._address = f"{f'[{host}]' if ':' in host else host}:{port}"
        _check_port(host, port, self._address)
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.IPV6, is_ipv6(self._address))
        self._socket.curve_publickey, self._socket.curve_secretkey = curve_keys(key, "reader")
        self._socket.curve_serverkey = curve_keys(key, "engine")[0]
        self._handshakes = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(f"tcp://{self._address}")
        if not self._handshakes.poll(1000 * CONNECT_S):  # who has another key is not told so
            self.close()
            raise ConfigError(f"{self._address}: its listener does not let this host in; give both the same BIREME_KEY")

    def ask(self, name: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Raises UnavailableError (no answer), BiremeError (what went wrong there)."""
        self._socket.send(msgspec.msgpack.encode([name, arguments]))
        if not self._socket.poll(1000 * timeout_s):
            raise UnavailableError(f"{self._address}: no answer to {name} within {timeout_s:.0f} s")
        result, error = msgspec.msgpack.decode(self._socket.recv())
        if error:
            raise BiremeError(f"{self._address}: {error}")
        return result

    def close(self) -> None:
        self._socket.disable_monitor()
        self._handshakes.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


def _check_port(host: str, port: int, address: str) -> None:
    """Raise ConfigError where nobody listens there, or no such listener."""
    start = f"start `python tools/check_fabric.py --listen --port {port}` there, and open that port"
    try:
        with socket.create_connection((host, port), CONNECT_S) as probe:
            probe.settimeout(CONNECT_S)
            greeting = probe.recv(1)
    except TimeoutError as error:
        raise ConfigError(f"{address}: no answer within {CONNECT_S:.0f} s: a firewall drops it; {start}") from error
    except ConnectionRefusedError as error:
        raise ConfigError(f"{address}: the port is closed; {start}") from error
    except OSError as error:
        raise ConfigError(f"{address}: can't be reached: {error}; check the host's name and its routes") from error
    if greeting != _GREETING:
        raise ConfigError(f"{address}: something else listens there; name the listener's port with --port")


class PieceServer:
    """Sends pieces over a plain socket to who knows a token, for one connection."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(32)
        self._server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self._server.settimeout(ANSWER_S)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, name="check-fabric-pieces", daemon=True).start()

    def _serve(self) -> None:
        with self._server, contextlib.suppress(OSError):
            peer, _ = self._server.accept()
            with peer:
                peer.settimeout(ANSWER_S)
                if not hmac.compare_digest(_receive(peer, len(self.token)), self.token):
                    return
                source = _memory(SOURCE_BYTES)
                while asked := _receive(peer, _PIECE.size):
                    size, count = _PIECE.unpack(asked)
                    for number in range(count):
                        peer.sendall(_part(source, size, number))


def piece_rates(host: str, port: int, token: bytes, cases: Mapping[int, int]) -> dict[int, tuple[float, float]]:
    """Return for each size of pieces milliseconds of one, and GB/s of so many. Raises ConfigError."""
    try:
        with socket.create_connection((host, port), CONNECT_S) as peer:
            peer.settimeout(ANSWER_S)
            peer.sendall(token)
            room = _memory(ROOM_BYTES)
            return {size: _piece_rate(peer, room, size, count) for size, count in cases.items()}
    except OSError as error:
        raise ConfigError(
            f"{host}:{port}: a plain socket does not get through: {error}; KV transfers take free ports: open them"
            " between the hosts (docs/security.md)"
        ) from error


def _piece_rate(peer: socket.socket, room: memoryview, size: int, count: int) -> tuple[float, float]:
    def seconds(pieces: int) -> float:
        began = time.perf_counter()
        peer.sendall(_PIECE.pack(size, pieces))
        for number in range(pieces):
            if not _receive_into(peer, _part(room, size, number)):
                raise ConnectionResetError("the other host has closed it")
        return time.perf_counter() - began

    one = sorted(seconds(1) for _ in range(9))[4]
    return 1e3 * one, size * count / 1e9 / min(seconds(count) for _ in range(3))


def _memory(num_bytes: int) -> memoryview:
    """Return memory whose pages are there."""
    array = np.frombuffer(zero_pages(num_bytes), np.uint8)
    array.fill(1)
    return memoryview(array)


def _part(memory: memoryview, size: int, number: int) -> memoryview:
    """Return the next piece of it; after the last the first."""
    begin = number % (len(memory) // size) * size
    return memory[begin : begin + size]


def _receive(peer: socket.socket, size: int) -> bytes:
    """Return as many bytes; none where the peer has ended."""
    data = bytearray(size)
    return bytes(data) if _receive_into(peer, memoryview(data)) else b""


def _receive_into(peer: socket.socket, room: memoryview) -> bool:
    got = 0
    while got < len(room):
        if not (count := peer.recv_into(room[got:])):
            return False
        got += count
    return True
