"""A reader's link to one publisher over ZeroMQ: a SUB socket, and a DEALER for each question."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import zmq

from bireme.discovery.records import WorkerRecord
from bireme.kv.wire.curve import curve_keys, is_ipv6, needs_curve
from bireme.kv.wire.event_wire import LOAD_TOPIC, MAX_PAYLOAD_BYTES, encode_seq, event_topic

_MESSAGES_A_TURN = 1_000
_HWM = 100_000  # messages that wait to be read; more are dropped, which shows as a gap


class ZmqLink:
    """Its sockets are in the owner's poller. Raises ZMQError for an address that makes no sense."""

    def __init__(self, record: WorkerRecord, num_ranks: int, context: Any, poller: Any, deployment_key: bytes) -> None:
        self._context, self._poller, self._key = context, poller, deployment_key
        self.first_seq: int | None = None
        self._replay_endpoint = record.replay_endpoint
        endpoints = [record.load_endpoint, record.event_endpoint if num_ranks else ""]
        topics = [LOAD_TOPIC, *(event_topic(rank) for rank in range(num_ranks))]
        self._subscriber = self._open(zmq.SUB, list(filter(None, endpoints)), topics)
        self._dealers: list[Any] = [None] * num_ranks

    def take(self) -> Iterator[list[bytes]]:
        return _messages(self._subscriber)

    def take_answers(self, rank: int) -> Iterator[list[bytes]]:
        dealer = self._dealers[rank]
        for frames in _messages(dealer) if dealer is not None else ():
            yield frames[1:] if not frames[0] else []

    def ask(self, rank: int, start: int) -> None:
        """Each question has a socket of its own: late answers go nowhere."""
        self.hang_up(rank)
        dealer = self._dealers[rank] = self._open(zmq.DEALER, [self._replay_endpoint])
        with contextlib.suppress(zmq.ZMQError):  # it asks again
            dealer.send_multipart([b"", encode_seq(start), event_topic(rank)], zmq.NOBLOCK)

    def hang_up(self, rank: int) -> None:
        if self._dealers[rank] is not None:
            self._close(self._dealers[rank])
            self._dealers[rank] = None

    def close(self) -> None:
        for socket in (self._subscriber, *filter(None, self._dealers)):
            self._close(socket)

    def _open(self, kind: int, endpoints: list[str], topics: list[bytes] | None = None) -> Any:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.IPV6, any(map(is_ipv6, endpoints)))
        socket.setsockopt(zmq.RCVHWM, _HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        try:
            for topic in topics or ():
                socket.subscribe(topic)
            if any(needs_curve(endpoint) for endpoint in endpoints):
                socket.curve_publickey, socket.curve_secretkey = curve_keys(self._key, "reader")
                socket.curve_serverkey = curve_keys(self._key, "engine")[0]
            for endpoint in endpoints:
                socket.connect(endpoint)
        except Exception:
            socket.close(0)
            raise
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _close(self, socket: Any) -> None:
        self._poller.unregister(socket)
        socket.close(0)


def _messages(socket: Any) -> Iterator[list[bytes]]:
    for _ in range(_MESSAGES_A_TURN):
        try:
            frames: list[bytes] = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield frames
