"""What workers hold and how busy they are, as their publishers tell it: one thread a process follows them all.

The feed writes into a KvIndex, under a lock that its readers take as well, and keeps each worker's last load. Workers
that the index does not know it adds, and removes with their records; those that its owner has added it only clears.
Events that come twice, late, out of order, malformed or from another life are counted and change nothing
(event_stream.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import zmq

from bireme.config import KvEventsConfig
from bireme.discovery.run import WorkerRecord
from bireme.kv.event_stream import KvEventStream
from bireme.kv.event_wire import (
    END,
    LOAD_TOPIC,
    TIERS_OF_MEDIA,
    BlockRemoved,
    ReadBatch,
    ReadEvent,
    StoredHashes,
    WorkerLoad,
    decode_batch,
    decode_load,
    decode_seq,
    rank_of,
)
from bireme.kv.events import DISK
from bireme.kv.index import KvIndex, rank_name
from bireme.kv.transfer.mailbox import Mailbox
from bireme.kv.zmq_link import ZmqLink
from bireme.metrics import Registry

if TYPE_CHECKING:
    from bireme.kv.nats_link import NatsReader

logger = logging.getLogger("bireme.kv")

SILENT_S = 3.5  # without a report for so long a worker's load is not known
_TURN_MS = 100  # how often time limits are looked at
_REST_S = 0.002  # between turns: what comes meanwhile is taken together


class Link(Protocol):
    """A reader's connection to one publisher; used on the feed's thread, never blocks."""

    first_seq: int | None  # what a reader begins with; None: with a snapshot

    def take(self) -> Iterable[list[bytes]]:
        """Return messages that have arrived, some of them: [topic, seq, payload], or whatever was sent instead."""

    def take_answers(self, rank: int) -> Iterable[list[bytes]]:
        """Return [seq, payload] of the answer to the last question alone."""

    def ask(self, rank: int, start: int) -> None: ...

    def hang_up(self, rank: int) -> None:
        """Nothing is asked any more."""

    def close(self) -> None: ...


class FollowedWorker:
    """One life of one worker: the link to its publisher, its ranks' streams, its slots in the index."""

    def __init__(self, name: str, record: WorkerRecord, feed: KvFeed) -> None:
        self.name, self.record, self.feed = name, record, feed
        self.slots: list[int] = []
        self._added: list[int] = []  # slots that were not there
        self.streams: list[KvEventStream] = []
        self.reported_at = time.monotonic()
        self._other_life = 0  # that answers at this one's address
        num_ranks = 0
        if record.event_endpoint and feed.index is not None:
            num_ranks = record.capacity.attention_dp_size if record.capacity else 1
        self.link = feed.open_link(record, num_ranks)
        try:
            for rank in range(num_ranks):
                self.streams.append(KvEventStream(partial(self._apply, rank), feed.count, first=self.link.first_seq))
                self.slots.append(self._take_slot(rank_name(name, rank)))
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """With the index's lock held."""
        self.link.close()
        index = self.feed.index
        for rank, slot in enumerate(self.slots):
            if index is None or not self._has_slot(rank):
                continue
            if slot in self._added:
                index.remove_worker(slot)
            else:
                index.cleared(slot)

    def _take_slot(self, name: str) -> int:
        """Return the slot of a worker that the index's owner has added, or else add it."""
        assert self.feed.index is not None
        if (slot := self.feed.index.slots.get(name)) is None:
            self._added.append(slot := self.feed.index.add_worker(name))
        return slot

    def _has_slot(self, rank: int) -> bool:
        """Whether its slot has not gone to another worker meanwhile."""
        assert self.feed.index is not None
        return self.feed.index.slots.get(rank_name(self.name, rank)) == self.slots[rank]

    def turn(self) -> None:
        """Take what has arrived, of several reports only the last, and ask what is to be asked."""
        report = None
        for frames in self.link.take():
            if frames[0] == LOAD_TOPIC:
                report = frames
            else:
                self._take_batch(frames)
        if report is not None:
            self._take_report(report)
        for rank, stream in enumerate(self.streams):
            for frames in self.link.take_answers(rank):
                stream.take_answer(*_read_batch(frames))
            if (start := stream.question()) is not None:
                self.link.ask(rank, start)
            elif stream.is_in_step:
                self.link.hang_up(rank)

    def _take_batch(self, frames: list[bytes]) -> None:
        rank = rank_of(frames[0])
        if rank is None or rank >= len(self.streams):
            self.feed.count("malformed", 1)
            return
        seq, batch = _read_batch(frames[1:])
        if batch is None or seq < 0 or batch.data_parallel_rank != rank:
            self.streams[rank].take_malformed()
        else:
            self.streams[rank].take(seq, batch)
            self.feed.lag_s = max(self.feed.lag_s, time.time() - batch.ts)

    def _take_report(self, frames: list[bytes]) -> None:
        try:
            report = decode_load(frames[2])
        except (msgspec.DecodeError, IndexError, RecursionError):
            self.feed.count("malformed", 1)
            return
        if report.worker != self.record.worker:
            self.feed.count("unknown_worker", 1)
        elif report.life != self.record.life:
            self.feed.count("dead_life", 1)
            if report.life != self._other_life:
                self._other_life = report.life
                for stream in self.streams:
                    stream.take_new_life()
        else:
            self.reported_at = time.monotonic()
            self.feed.loads[self.name] = report.load
            for stream, next_seq in zip(self.streams, report.next_seqs, strict=False):
                stream.take_next_seq(next_seq)

    def _apply(self, rank: int, events: list[ReadEvent]) -> None:
        index, slot = self.feed.index, self.slots[rank]
        assert index is not None
        with self.feed.lock:
            for event in events if self._has_slot(rank) else ():
                if isinstance(event, StoredHashes):
                    tier = TIERS_OF_MEDIA.get(event.medium or "GPU", DISK)
                    index.stored(slot, event.parent_block_hash, np.array(event.block_hashes, np.uint64), tier)
                elif isinstance(event, BlockRemoved):
                    tier = TIERS_OF_MEDIA.get(event.medium or "GPU", DISK)
                    index.removed(slot, np.array(event.block_hashes, np.uint64), tier)
                else:
                    index.cleared(slot)


class KvFeed:
    """`start`, then `follow` whenever the view of workers changes; `close` at the end."""

    def __init__(
        self,
        index: KvIndex | None,
        deployment_key: bytes,
        metrics: Registry,
        lock: contextlib.AbstractContextManager[Any] | None = None,
        config: KvEventsConfig | None = None,
    ) -> None:
        """`index`: None where only load is wanted. `lock`: whoever reads the index holds it. `config`: for NATS."""
        self.index, self.lock = index, lock if lock is not None else threading.Lock()
        self.loads: dict[str, WorkerLoad] = {}  # of the workers that have reported lately; read from any thread
        self.slots: Mapping[str, tuple[int, ...]] = {}  # worker -> slot of each rank; changes with the lock held
        self.counters: Counter[str] = Counter()
        self.lag_s = 0.0  # the oldest batch when it was applied, since the last look
        self._deployment_key, self._metrics, self._config = deployment_key, metrics, config or KvEventsConfig()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._mailbox = Mailbox()
        self._poller.register(self._mailbox.descriptor, zmq.POLLIN)
        self._nats: NatsReader | None = None
        self._followers: dict[str, FollowedWorker] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Take the whole present view; from any thread. Those without a publisher are left out."""
        view = {name: one for name, one in workers.items() if one.event_endpoint or one.load_endpoint}
        self._mailbox.post(lambda: self._set_workers(view))

    def out_of_step(self) -> list[str]:
        """Return the workers of whose blocks or load nothing certain is known now; from any thread."""
        return [
            name
            for name, one in list(self._followers.items())
            if name not in self.loads or not all(stream.is_in_step for stream in one.streams)
        ]

    def close(self) -> None:
        self._mailbox.post(self._begin_close)
        if self._thread.ident is not None:
            self._thread.join(2)

    def count(self, what: str, amount: int) -> None:
        self.counters[what] += amount
        if what == "gaps":
            self._metrics.add("bireme_kv_feed_gaps_total", amount)
        elif what == "resyncs":
            self._metrics.add("bireme_kv_feed_resyncs_total", amount)
        else:
            self._metrics.add("bireme_kv_feed_discarded_total", amount, what)

    def open_link(self, record: WorkerRecord, num_ranks: int) -> Link:
        """Raises ConfigError, ZMQError."""
        endpoint = record.load_endpoint or record.event_endpoint
        if not endpoint.startswith("nats:"):
            return ZmqLink(record, num_ranks, self._context, self._poller, self._deployment_key)
        if self._nats is None:
            from bireme.kv.nats_link import NatsReader

            self._nats = NatsReader(self._config, self._deployment_key, lambda: self._mailbox.post(lambda: None))
        return self._nats.open_link(endpoint, num_ranks)

    @property
    def problem(self) -> str:
        """Why nothing can be learned from any worker now; "": no reason. From any thread."""
        return self._nats.problem if self._nats is not None else ""

    def _begin_close(self) -> None:
        self._is_closing = True

    def _set_workers(self, view: Mapping[str, WorkerRecord]) -> None:
        for name, one in list(self._followers.items()):
            if name not in view or _identity(view[name]) != _identity(one.record):
                self._drop(name)
        for name, record in view.items():
            if name not in self._followers:
                try:
                    with self.lock:
                        self._followers[name] = FollowedWorker(name, record, self)
                except Exception as error:  # an address that makes no sense, an index that is full: the others go on
                    logger.error("kv_feed_not_followed worker=%s error=%s", name, error)
        with self.lock:
            self.slots = {name: tuple(one.slots) for name, one in self._followers.items()}

    def _drop(self, name: str) -> None:
        with self.lock:
            self._followers.pop(name).close()
            self.slots = {other: slots for other, slots in self.slots.items() if other != name}
        self.loads.pop(name, None)

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
            except Exception:  # one worker's messages must not end what all need
                logger.exception("kv_feed_failed")
                time.sleep(_TURN_MS / 1000)
        for name in list(self._followers):
            self._drop(name)
        if self._nats is not None:
            self._nats.close()
        self._mailbox.close()
        self._context.term()

    def _turn(self) -> None:
        ready = self._poller.poll(_TURN_MS)
        for letter in self._mailbox.take():
            letter()
        now = time.monotonic()
        self.lag_s = 0.0
        for name, one in list(self._followers.items()):
            one.turn()
            if now - one.reported_at > SILENT_S:
                self.loads.pop(name, None)
        if ready:
            self._metrics.set("bireme_kv_feed_lag_seconds", self.lag_s)
            time.sleep(_REST_S)


def _identity(record: WorkerRecord) -> tuple[Any, ...]:
    return record.worker, record.life, record.event_endpoint, record.replay_endpoint, record.load_endpoint


def _read_batch(frames: list[bytes]) -> tuple[int, ReadBatch | None]:
    """Return seq and batch; without one: the end of an answer, or (seq 0) what can't be read."""
    try:
        number, payload = frames
        seq = decode_seq(number)
        return seq, None if seq == END else decode_batch(payload)
    except (ValueError, msgspec.DecodeError, RecursionError):
        return 0, None
