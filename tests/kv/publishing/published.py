"""An engine as its publisher sees it, and publishers of such engines."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bireme.discovery.records import WorkerRecord
from bireme.kv.blocks.events import EventBuffer, StoredBlock
from bireme.kv.blocks.hashing import event_seed, sequence_hashes
from bireme.kv.following.feed import KvFeed
from bireme.kv.publishing.publisher import KvPublisher
from bireme.kv.publishing.step_stream import StepStream
from bireme.kv.publishing.zmq_plane import ZmqPlane
from bireme.metrics import Registry

SIZE = 16
KEY = b"k" * 32


class Source:
    """Records what a test says that its engine does."""

    def __init__(self, max_size: int = 1000) -> None:
        self.events = EventBuffer(max_size)
        self.state = {"step": 0, "num_waiting": 0, "num_running": 0, "num_waiting_tokens": 0, "num_blocks_used": 0}
        self.prices: Any = None
        self.error: Exception | None = None
        self.unread = threading.Lock()  # who holds it records events that the publisher takes all at once

    def kv_events(self) -> list[Any]:
        if self.error:
            raise self.error
        with self.unread:
            return self.events.drain()

    def progress(self) -> Any:
        return SimpleNamespace(**self.state, num_blocks=8, prices=self.prices)

    def store(self, tokens: list[int], salt: str = "") -> list[int]:
        hashes = sequence_hashes(tokens, SIZE, event_seed("", salt))
        blocks = [StoredBlock(value, tuple(tokens[at * SIZE : (at + 1) * SIZE])) for at, value in enumerate(hashes)]
        self.events.stored(None, tuple(blocks), "", salt)
        return hashes


def out_of_step(feed: KvFeed) -> list[str]:
    """Return the workers of whose blocks or load the feed knows nothing certain now."""
    return [
        name
        for name, one in list(feed._followers.items())
        if name not in feed.loads or not all(stream.is_in_step for stream in one.streams)
    ] + list(feed._missing)


class Published:
    """A publisher on real sockets, with its source."""

    def __init__(self, folder: Path, worker: str = "decode", life: int = 7, host: str = "", **settings: Any) -> None:
        self.source, self.metrics = Source(settings.pop("max_size", 1000)), Registry(worker)
        has_events, self.ring = settings.get("has_events", True), settings.pop("ring", None)
        plane, has_steps = settings.pop("plane", None), self.ring is not None
        self.plane: Any = plane or ZmqPlane(
            f"ipc://{folder}/{worker}-{life}", host, KEY, has_events=has_events, has_steps=has_steps
        )
        if self.ring is not None:
            ranks = settings.get("num_ranks", 1)
            settings["steps"] = StepStream(self.ring, f"{worker}@here:1", life, ranks, self.metrics)
        options = {"has_events": True, "replay_batches": 100, "num_ranks": 1} | settings
        self.publisher = KvPublisher(
            self.source, self.plane, worker=worker, life=life, tokens_per_block=SIZE,
            deployment_key=KEY, metrics=self.metrics, **options,
        )  # fmt: skip
        self.record = WorkerRecord(
            worker=worker,
            life=life,
            load_endpoint=self.plane.load_endpoint,
            event_endpoint=self.plane.event_endpoint,
            replay_endpoint=self.plane.replay_endpoint,
            step_endpoint=self.plane.step_endpoint,
        )
        self._is_open = True
        self.publisher.start()

    def store(self, tokens: list[int], salt: str = "") -> list[int]:
        hashes = self.source.store(tokens, salt)
        self.publisher.wake()
        return hashes

    def remove(self, *hashes: int) -> None:
        for value in hashes:
            self.source.events.removed(value)
        self.publisher.wake()

    def counter(self, name: str) -> float:
        return sum(value for found, _, value in self.metrics.take_delta().counters if found == name)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.publisher.close()
