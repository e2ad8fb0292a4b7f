"""The ZeroMQ event plane of one engine: a PUB socket of events, a ROUTER that answers who missed some, a PUB of load.

Load has a socket of its own, so that a reader of vLLM's format that takes every topic finds nothing else among events.
So have step records, for Dynamo's readers.
Unix sockets in the run folder, which only this user enters, or TCP. On another address than loopback all speak CURVE
with keys made from the deployment's key: only its processes can read, and no reader takes another for an engine.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import zmq

from bireme.errors import ConfigError
from bireme.kv.publishing.publisher import ReplayRequest
from bireme.kv.wire.curve import curve_keys, is_ipv6, let_in_readers, needs_curve
from bireme.kv.wire.event_wire import LOAD_TOPIC, decode_seq, encode_seq, rank_of
from bireme.kv.wire.step_records import STEP_TOPIC

_EVENT_HWM = 5_000  # batches that wait for a slow subscriber; more are dropped for it, which it sees as a gap
_LOAD_HWM = 100  # of reports only the last counts
_STEP_HWM = 10_000  # records that wait for a slow subscriber; more are dropped for it, which it sees as a gap
_ROUTER_HWM = 64
_MAX_REQUEST_BYTES = 1024
_REQUESTS_A_TURN = 64


class ZmqPlane:
    """Binds when it is made. Raises ConfigError."""

    def __init__(
        self, ipc_prefix: str, host: str, deployment_key: bytes, *, has_events: bool = True, has_steps: bool = False
    ) -> None:
        """`ipc_prefix`: of the Unix sockets, `ipc:///run/decode-1`; `host`: an address to bind instead."""
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing, self._is_closed = threading.Lock(), False
        self._context = zmq.Context()
        self._authenticator: Any = None
        base = ipc_prefix
        if host:
            base = f"tcp://[{host}]:*" if ":" in host and "[" not in host else f"tcp://{host}:*"
        if host and needs_curve(base):
            self._authenticator = let_in_readers(self._context, deployment_key)
        self._deployment_key = deployment_key
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup, zmq.POLLIN)
        self._sockets: dict[str, Any] = {}  # by their endpoints
        self._load = self._bind(zmq.PUB, _LOAD_HWM, base if host else base + ".l")
        self._events: Any = None
        self._router: Any = None
        if has_events:
            self._events = self._bind(zmq.PUB, _EVENT_HWM, base if host else base + ".e")
            self._router = self._bind(zmq.ROUTER, _ROUTER_HWM, base if host else base + ".r")
            self._poller.register(self._router, zmq.POLLIN)
        self._steps = self._bind(zmq.PUB, _STEP_HWM, base if host else base + ".s") if has_steps else None

    @property
    def problem(self) -> str:
        return ""

    @property
    def load_endpoint(self) -> str:
        return _endpoint(self._load)

    @property
    def event_endpoint(self) -> str:
        return _endpoint(self._events)

    @property
    def replay_endpoint(self) -> str:
        return _endpoint(self._router)

    @property
    def step_endpoint(self) -> str:
        return _endpoint(self._steps)

    def wait(self, timeout_s: float) -> None:
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)

    def wake(self) -> None:
        """After `close` nothing."""
        with self._closing:
            if not self._is_closed:
                os.eventfd_write(self._wakeup, 1)

    def publish(self, topic: bytes, seq: int, payload: bytes) -> None:
        socket = {LOAD_TOPIC: self._load, STEP_TOPIC: self._steps}.get(topic, self._events)
        assert socket is not None
        socket.send_multipart((topic, encode_seq(seq), payload), zmq.NOBLOCK)

    def requests(self) -> list[ReplayRequest]:
        found = []
        for _ in range(_REQUESTS_A_TURN if self._router is not None else 0):
            try:
                client, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if (request := parse_request(client, frames)) is not None:
                found.append(request)
        return found

    def answer(self, client: Any, seq: int, payload: bytes) -> bool:
        try:
            self._router.send_multipart((client, b"", encode_seq(seq), payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def tick(self) -> None:
        """Bind sockets again whose files were deleted, as cleaners of temporary files do.

        One name more: to unbind the former one would break the connections that came by it.
        """
        for endpoint, socket in self._sockets.items():
            path = Path(endpoint.removeprefix("ipc://"))
            if endpoint.startswith("ipc://") and not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                socket.bind(endpoint)

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        for endpoint in self._sockets:
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        with self._closing:
            self._is_closed = True
            os.close(self._wakeup)

    def _bind(self, kind: int, limit: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.IPV6, is_ipv6(endpoint))
        socket.setsockopt(zmq.SNDHWM, limit)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._authenticator is not None:
            socket.curve_publickey, socket.curve_secretkey = curve_keys(self._deployment_key, "engine")
            socket.curve_server = True
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events: {endpoint} can't be bound: {error}; set kv_events.host to an address of this host,"
                ' or to "" for Unix sockets'
            ) from error
        self._sockets[_endpoint(socket)] = socket
        return socket


def _endpoint(socket: Any) -> str:
    return socket.last_endpoint.decode() if socket is not None else ""


def parse_request(client: Any, frames: list[bytes]) -> ReplayRequest | None:
    """Return what is asked for; None: it makes no sense, and gets no answer."""
    if len(frames) not in (2, 3) or frames[0]:
        return None
    rank = rank_of(frames[2]) if len(frames) == 3 else 0
    try:
        start = decode_seq(frames[1])
    except ValueError:
        return None
    return ReplayRequest(client, rank, start) if rank is not None and start >= -1 else None
