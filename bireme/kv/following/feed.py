"""What workers hold and how busy they are, as their publishers tell it: one thread a process follows them all.

The feed writes into a KvIndex, under a lock that its readers take as well, and keeps each worker's last load. Workers
that the index does not know it adds, and removes with their records; those that its owner has added it only clears.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from bireme.config import KvEventsConfig
from bireme.discovery.records import WorkerRecord
from bireme.kv.following.event_stream import KvEventStream
from bireme.kv.following.index import KvIndex, rank_name
from bireme.kv.following.zmq_link import ZmqLink
from bireme.kv.wire.event_reading import BlockChanges, EventReader, ReadBatch, read_batch
from bireme.kv.wire.event_wire import END, LOAD_TOPIC, WorkerLoad, decode_load, decode_seq, rank_of
from bireme.kv.wire.mailbox import Mailbox
from bireme.metrics import Registry

if TYPE_CHECKING:
    from bireme.kv.following.nats_link import NatsReader

logger = logging.getLogger("bireme.kv")

SILENT_S = 3.5  # without a report for so long a worker's load is not known
_MAX_SOCKETS = 65_000  # libzmq's own limit is 1,023: 500 workers' worth
_RETRY_S = 1.0  # from one try to follow a worker to the next
_TURN_MS = 100  # how often time limits are looked at
_PAUSE_S = 0.002  # between turns: what comes meanwhile is taken together
_PORTION_BYTES = 256 << 10  # of events that are read at once: so few that they stay in the processor's cache


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
        self._pending: list[tuple[int, BlockChanges]] = []  # (rank, what the index is to be told)
        self._report: list[bytes] | None = None  # the last one that came
        self.reported_at = time.monotonic()
        self._other_life = 0  # that answers at this one's address
        num_ranks = 0
        if record.event_endpoint and feed.index is not None:
            num_ranks = record.capacity.attention_dp_size if record.capacity else 1
        self.link = feed.open_link(record, num_ranks)
        try:
            for rank in range(num_ranks):
                self.streams.append(KvEventStream(partial(self._keep, rank), feed.count, first=self.link.first_seq))
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

    def arrived(self) -> Iterator[tuple[int, int, bytes]]:
        """Return rank, seq and payload of batches that have come; of several reports the last one is kept."""
        for frames in self.link.take():
            if frames[0] == LOAD_TOPIC:
                self._report = frames
            elif (rank := rank_of(frames[0])) is None or rank >= len(self.streams):
                self.feed.count("malformed", 1)
            elif (seq := _seq_of(frames)) is None or seq < 0:
                self.streams[rank].take_malformed()
            else:
                yield rank, seq, frames[2]

    def take_batch(self, rank: int, seq: int, batch: ReadBatch | None) -> None:
        """Take what has come, as it was read; `KvFeed.apply` must follow."""
        if batch is None or batch.data_parallel_rank != rank:
            self.streams[rank].take_malformed()
        else:
            self.streams[rank].take(seq, batch)

    def let_through(self) -> Iterator[BlockChanges]:
        """Return, once, what the index is to be told. With its lock held."""
        pending, self._pending = self._pending, []
        for rank, changes in pending:
            if self._has_slot(rank):
                yield changes.of_slot(self.slots[rank])

    def turn(self) -> None:
        """Take the report and answers that have come, and ask what is to be asked."""
        if self._report is not None:
            report, self._report = self._report, None
            self._take_report(report)
        for rank, stream in enumerate(self.streams):
            for frames in self.link.take_answers(rank):
                stream.take_answer(*_read_answer(frames))
                self.feed.apply([self])
            if (start := stream.question()) is not None:
                self.link.ask(rank, start)
            elif stream.is_in_step:
                self.link.hang_up(rank)
        if self._pending:
            self.feed.apply([self])

    def _take_report(self, frames: list[bytes]) -> None:
        try:
            report = decode_load(frames[2])
        except (ValueError, IndexError, RecursionError):
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

    def _keep(self, rank: int, changes: BlockChanges) -> None:
        if self._pending and self._pending[-1][0] == rank and (joined := self._pending[-1][1].joined(changes)):
            self._pending[-1] = rank, joined
        else:
            self._pending.append((rank, changes))


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
        self._reader = EventReader() if index is not None else None
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._poller = zmq.Poller()
        self._mailbox = Mailbox()
        self._poller.register(self._mailbox.descriptor, zmq.POLLIN)
        self._nats: NatsReader | None = None
        self._followers: dict[str, FollowedWorker] = {}
        self._missing: dict[str, WorkerRecord] = {}  # that could not be followed
        self._logged: set[str] = set()  # of these, whose error has been logged
        self._retry_at = math.inf
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-feed", daemon=True)
        metrics.start("bireme_kv_feed_gaps_total", "bireme_kv_feed_resyncs_total")
        for reason in ("malformed", "unknown_worker", "dead_life"):
            metrics.start("bireme_kv_feed_discarded_total", labels=(reason,))

    def start(self) -> None:
        self._thread.start()

    def follow(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Take the whole present view; from any thread. Those without a publisher are left out."""
        view = {name: one for name, one in workers.items() if one.event_endpoint or one.load_endpoint}
        self._mailbox.post(lambda: self._set_workers(view))

    def close(self) -> None:
        self._mailbox.post(self._begin_close)
        if self._thread.ident is not None:
            self._thread.join(2)

    def count(self, what: str, amount: int) -> None:
        self.counters[what] += amount
        if what in ("gaps", "resyncs"):
            self._metrics.add(f"bireme_kv_feed_{what}_total", amount)
        else:
            self._metrics.add("bireme_kv_feed_discarded_total", amount, what)

    def open_link(self, record: WorkerRecord, num_ranks: int) -> Link:
        """Raises ConfigError, ZMQError."""
        endpoint = record.load_endpoint or record.event_endpoint
        if not endpoint.startswith("nats:"):
            return ZmqLink(record, num_ranks, self._context, self._poller, self._deployment_key)
        if self._nats is None:
            from bireme.kv.following.nats_link import NatsReader

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
        self._missing = {name: record for name, record in view.items() if name not in self._followers}
        self._retry_at = 0.0
        self._follow_missing()

    def _follow_missing(self) -> None:
        """Follow those of the view that are not followed, if it is time: what one lacked then may be there now."""
        if time.monotonic() < self._retry_at:
            return
        for name, record in list(self._missing.items()):
            try:
                with self.lock:
                    self._followers[name] = FollowedWorker(name, record, self)
                del self._missing[name]
            except Exception as error:  # an address that makes no sense, an index that is full: the others go on
                if name not in self._logged:
                    logger.error("kv_feed_not_followed worker=%s error=%s", name, error)
                self._logged.add(name)
        self._logged &= set(self._missing)
        self._retry_at = time.monotonic() + _RETRY_S if self._missing else math.inf
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
        self._follow_missing()
        self._take_arrived()
        for name, one in list(self._followers.items()):
            one.turn()
            if now - one.reported_at > SILENT_S:
                self.loads.pop(name, None)
        if ready:
            self._metrics.set("bireme_kv_feed_lag_seconds", self.lag_s)
            time.sleep(_PAUSE_S)

    def _take_arrived(self) -> None:
        portion: list[tuple[FollowedWorker, int, int, bytes]] = []
        num_bytes = 0
        for one in self._followers.values():
            for rank, seq, payload in one.arrived():
                portion.append((one, rank, seq, payload))
                num_bytes += len(payload)
                if num_bytes > _PORTION_BYTES:
                    self._take_batches(portion)
                    portion, num_bytes = [], 0
        self._take_batches(portion)

    def _take_batches(self, portion: list[tuple[FollowedWorker, int, int, bytes]]) -> None:
        """Read batches of all workers at once, and tell the index of them while the lock is held once."""
        if not portion or self._reader is None:
            return
        now = time.time()
        batches = self._reader.read([payload for _, _, _, payload in portion])
        for (one, rank, seq, _), batch in zip(portion, batches, strict=True):
            one.take_batch(rank, seq, batch)
            if batch is not None:
                self.lag_s = max(self.lag_s, now - batch.ts)
        self.apply({id(one): one for one, _, _, _ in portion}.values())

    def apply(self, followers: Collection[FollowedWorker]) -> None:
        """Write into the index what the followers' streams have let through: in one call what lies together."""
        assert self.index is not None
        try:
            with self.lock:
                for changes in _joined(itertools.chain.from_iterable(one.let_through() for one in followers)):
                    self.index.apply(changes)
        except Exception:  # such as an index that is full: what is known of these workers is not whole
            for stream in itertools.chain.from_iterable(one.streams for one in followers):
                stream.take_new_life()
            raise


def _joined(parts: Iterable[BlockChanges]) -> Iterator[BlockChanges]:
    """Put together what lies together."""
    whole: BlockChanges | None = None
    for part in parts:
        longer = whole.joined(part) if whole is not None else part
        if longer is None and whole is not None:
            yield whole
        whole = longer or part
    if whole is not None:
        yield whole


def _identity(record: WorkerRecord) -> tuple[Any, ...]:
    return record.worker, record.life, record.event_endpoint, record.replay_endpoint, record.load_endpoint


def _seq_of(frames: list[bytes]) -> int | None:
    try:
        _, number, _ = frames
        return decode_seq(number)
    except ValueError:
        return None


def _read_answer(frames: list[bytes]) -> tuple[int, ReadBatch | None]:
    """Return seq and batch; without one: the end of an answer, or (seq 0) what can't be read."""
    seq = _seq_of([b"", *frames])
    if seq is None or seq == END:
        return seq or 0, None
    batch = read_batch(frames[1])
    return (seq, batch) if batch is not None else (0, None)
