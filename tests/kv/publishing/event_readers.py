"""Readers of KV events that know nothing of bireme: vLLM's own structs, subscriber and replay, as it documents them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import zmq


class VllmEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class VllmEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(VllmEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(VllmEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(VllmEvent):
    pass


class VllmBatch(VllmEventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class VllmSubscriber:
    """A SUB and a REQ socket, as in vLLM's example of a subscriber."""

    def __init__(self, event_endpoint: str, replay_endpoint: str, topic: str = "kv-events") -> None:
        self._context = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.connect(event_endpoint)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay_endpoint = replay_endpoint

    def take(self, timeout_s: float = 10.0) -> tuple[bytes, int, VllmBatch]:
        assert self.sub.poll(int(timeout_s * 1000)), "no message"
        topic, seq, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload, type=VllmBatch)

    def replay(self, start: int, *more: bytes) -> list[tuple[int, VllmBatch]]:
        found = []
        socket = self._context.socket(zmq.DEALER)  # REQ takes one answer a request; vLLM's example reads several
        socket.connect(self._replay_endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big", signed=True), *more])
        while True:
            assert socket.poll(10_000), "no answer"
            empty, seq, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(seq, "big", signed=True) == -1:
                socket.close(0)
                return found
            found.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload, type=VllmBatch)))

    def close(self) -> None:
        self._context.destroy(0)


class StepSubscriber:
    """A SUB socket as Dynamo's relay opens it: of every topic, and frames other than three are no record."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.subscribe("")
        self.sub.connect(endpoint)

    def take(self, timeout_s: float = 10.0) -> dict[str, Any]:
        assert self.sub.poll(int(timeout_s * 1000)), "no record"
        topic, seq, payload = self.sub.recv_multipart()
        record: dict[str, Any] = msgspec.msgpack.decode(payload)
        assert (topic, int.from_bytes(seq, "big")) == (b"forward-pass-metrics", record["counter_id"])
        return record

    def until(self, is_last: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Return all records up to the first that is such."""
        records = [self.take()]
        while not is_last(records[-1]):
            records.append(self.take())
        return records

    def close(self) -> None:
        self._context.destroy(0)
