"""Tells routers what an engine holds and how busy it is, and others what its steps did: one thread in its process.

The engine never waits for this thread, which is woken after each step. What it sends is kept for readers that miss
something, within bounds; who asks for more gets a snapshot, a part a turn. An error is counted, and leaves a gap in the
sequence, which readers see.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from bireme.child_process import Backoff
from bireme.kv.blocks import hashing
from bireme.kv.blocks.events import KvEvent
from bireme.kv.publishing.held_blocks import HeldBlocks
from bireme.kv.publishing.step_stream import StepStream
from bireme.kv.wire.event_wire import (
    END,
    LOAD_TOPIC,
    SNAPSHOT,
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    LoadReport,
    WireEvent,
    WorkerLoad,
    WorkerPrices,
    encode_payload,
    event_topic,
)
from bireme.kv.wire.step_records import STEP_TOPIC
from bireme.metrics import Registry

logger = logging.getLogger("bireme.kv")

LOOK_S = 0.01  # between two looks while something changes
LOAD_S = 0.05  # between two reports of which only blocks and tokens differ: in decode they do at every step
HEARTBEAT_S = 1.0
PRICES_S = 0.25  # between two looks at what the engine takes
_QUIET_S = 0.1  # without a change for so long it sleeps until it is woken
_BATCH_WEIGHT = 65_536  # tokens and hashes of one batch: half a MiB at the most, which every plane carries
_SNAPSHOT_WEIGHT = 16_384  # of one turn's part
_MAX_ANSWERS = 64  # that are being sent at once; one more must ask again
_ANSWER_TIMEOUT_S = 5.0  # a reader that takes nothing for so long must ask again
_KEPT_BYTES = 64 << 20  # of sent batches, a rank
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


class EngineState(Protocol):
    """Of an engine's progress, what routers ask for."""

    @property
    def step(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting_tokens(self) -> int: ...
    @property
    def num_blocks_used(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def prices(self) -> Callable[[], WorkerPrices | None] | None: ...


class EventSource(Protocol):
    """The engine's side; both are quick and thread-safe."""

    def kv_events(self) -> list[KvEvent]: ...

    def progress(self) -> EngineState: ...


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    client: Any  # whom the plane answers
    rank: int
    start: int  # seq of the first batch that is wanted; SNAPSHOT: of all that is held


class EventPlane(Protocol):
    """Carries messages to readers. Everything but `wake` is called on the publisher's thread, and never blocks.

    The endpoints are for the worker's record.
    """

    @property
    def problem(self) -> str:
        """Why nothing can be sent now; "": it can. Meanwhile the engine's buffer keeps its events."""

    @property
    def load_endpoint(self) -> str: ...
    @property
    def event_endpoint(self) -> str: ...
    @property
    def replay_endpoint(self) -> str: ...
    @property
    def step_endpoint(self) -> str: ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until a request is there, it is woken, or the time is over."""

    def wake(self) -> None:
        """From any thread."""

    def publish(self, topic: bytes, seq: int, payload: bytes) -> None:
        """Raises OSError or ZMQError; readers see the gap."""

    def requests(self) -> list[ReplayRequest]: ...

    def answer(self, client: Any, seq: int, payload: bytes) -> bool:
        """False: it can't take more now. Raises when it is gone."""

    def tick(self) -> None:
        """Called once a second: repair what others have broken."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Snapshot:
    """What is held after a batch. All readers that ask meanwhile share it: a copy each would take megabytes."""

    seq: int  # of that batch
    unmade: Iterator[bytes]
    made: list[bytes] = field(default_factory=list)

    def payloads(self) -> Iterator[tuple[int, bytes]]:
        """Yield the parts, for one reader; the first who comes to a part has it made."""
        for at in itertools.count():
            if at == len(self.made):
                if (part := next(self.unmade, None)) is None:
                    return
                self.made.append(part)
            yield self.seq, self.made[at]


@dataclass(slots=True)
class _Rank:
    """One rank's sequence, what it holds, and what was sent last."""

    number: int
    held: HeldBlocks
    snapshot: _Snapshot | None = None  # while it is being sent
    next_seq: int = 0
    kept: collections.deque[tuple[int, bytes]] = field(default_factory=collections.deque)
    kept_bytes: int = 0

    def keep(self, seq: int, payload: bytes, max_batches: int) -> None:
        self.kept.append((seq, payload))
        self.kept_bytes += len(payload)
        while len(self.kept) > max_batches or (self.kept_bytes > _KEPT_BYTES and len(self.kept) > 1):
            self.kept_bytes -= len(self.kept.popleft()[1])

    def kept_from(self, start: int) -> Iterator[tuple[int, bytes]]:
        return iter([item for item in self.kept if item[0] >= start])

    def can_replay(self, start: int) -> bool:
        first = self.kept[0][0] if self.kept else self.next_seq
        return first <= start <= self.next_seq


@dataclass(slots=True)
class _Answer:
    """A reader's answer under way: payloads are made one at a time, so that a long one holds nothing up."""

    payloads: Iterator[tuple[int, bytes]]
    next: tuple[int, bytes]
    sent_at: float


class KvPublisher:
    """`start` once the engine is ready, `wake` after its steps, `close` at the end."""

    def __init__(
        self,
        source: EventSource,
        plane: EventPlane,
        *,
        worker: str,
        life: int,
        tokens_per_block: int,
        num_ranks: int,
        deployment_key: bytes,
        metrics: Registry,
        has_events: bool,
        replay_batches: int,
        steps: StepStream | None = None,
    ) -> None:
        self._steps = steps
        self._source, self._plane, self._metrics = source, plane, metrics
        self._worker, self._life = worker, life
        self._has_events = has_events
        self._replay_batches = replay_batches
        self._tokens_per_block, self._salt_key = tokens_per_block, hashing.salt_key(deployment_key)
        self._ranks: list[_Rank] = []
        if has_events:
            self._rank(num_ranks - 1)
        self._next_event_id: int | None = None
        self._answers: dict[Any, _Answer] = {}
        self._is_answering = False  # readers take what is sent to them
        self._load_seq = 0
        self._last_load: WorkerLoad | None = None
        self._prices: WorkerPrices | None = None
        self._priced_at = 0.0
        self._reported_at = self._changed_at = self._last_ts = 0.0
        self._had_failed = self._has_failed = False  # the last turn, this one
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)  # after turns that fail
        self._is_awake = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-publisher", daemon=True)
        metrics.start("bireme_kv_event_gaps_total", "bireme_kv_event_replays_total")
        for what in ("publish", "turn"):
            metrics.start("bireme_kv_event_errors_total", labels=(what,))

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """The engine may have changed something; from any thread, costs next to nothing while this one is busy."""
        if not self._is_awake and not self._is_closing:
            self._is_awake = True
            self._plane.wake()

    def close(self) -> None:
        self._is_closing = True
        self._plane.wake()
        if self._thread.ident is not None:
            self._thread.join(2)
        self._plane.close()

    def _run(self) -> None:
        self._changed_at = time.monotonic()
        while not self._is_closing:
            self._plane.wait(self._pause())
            self._had_failed, self._has_failed = self._has_failed, False
            self._guard("turn", self._turn)
            self._metrics.set("bireme_kv_publisher_up", not self._has_failed)
            if not self._has_failed:
                self._backoff.reset()
            elif not self._is_closing:
                time.sleep(self._backoff.next_s())

    def _pause(self) -> float:
        """Return how long to sleep: not at all while readers take answers, little while things change."""
        if self._is_answering:
            return 0.0
        now = time.monotonic()
        if self._answers or now - self._changed_at < _QUIET_S:
            time.sleep(LOOK_S)  # what comes meanwhile shares a batch
            return 0.0
        return max(0.0, self._reported_at + HEARTBEAT_S - now)

    def _turn(self) -> None:
        if self._is_awake:
            self._changed_at = time.monotonic()
            self._is_awake = False
        if problem := self._plane.problem:
            raise OSError(problem)
        for rank in self._ranks:
            if not rank.next_seq:  # readers of an earlier life at this address forget what it held
                self._send(rank, [AllBlocksCleared()])
        self._publish_events()
        for number, payload in self._steps.take() if self._steps is not None else ():
            self._guard("publish", partial(self._plane.publish, STEP_TOPIC, number, payload))
        self._report_load()
        for request in self._plane.requests():
            self._begin_answer(request)
        self._go_on_answering()

    def _publish_events(self) -> None:
        events = self._source.kv_events() if self._has_events else []
        if not events:
            return
        self._changed_at = time.monotonic()
        by_rank: dict[int, list[KvEvent]] = {}
        for event in events:
            if self._next_event_id not in (None, event.event_id):
                self._lose_track(event.event_id, by_rank)
            self._next_event_id = event.event_id + 1
            by_rank.setdefault(event.dp_rank, []).append(event)
        for number, part in by_rank.items():
            rank = self._rank(number)
            for batch in _portions(rank.held.apply(part), _BATCH_WEIGHT):
                self._send(rank, batch)

    def _lose_track(self, event_id: int, by_rank: dict[int, list[KvEvent]]) -> None:
        """The engine's buffer was full: what was lost is not known, so nothing that is held is."""
        assert self._next_event_id is not None
        num_lost = max(1, event_id - self._next_event_id)
        logger.warning("kv_events_lost worker=%s count=%d", self._worker, num_lost)
        self._metrics.add("bireme_kv_event_gaps_total", num_lost)
        for rank in self._ranks:
            self._send(rank, rank.held.apply(by_rank.pop(rank.number, [])) + rank.held.clear())

    def _rank(self, number: int) -> _Rank:
        while number >= len(self._ranks):
            self._ranks.append(_Rank(len(self._ranks), HeldBlocks(self._tokens_per_block, self._salt_key)))
        return self._ranks[number]

    def _send(self, rank: _Rank, events: list[WireEvent]) -> None:
        """Give the batch its number, keep it and send it: one that is not sent is a gap that readers can fill."""
        payload = encode_payload(EventBatch(self._now(), events, rank.number))
        seq = rank.next_seq
        rank.next_seq += 1
        rank.keep(seq, payload, self._replay_batches)
        self._metrics.add("bireme_kv_event_batches_total")
        self._guard("publish", lambda: self._plane.publish(event_topic(rank.number), seq, payload))

    def _report_load(self) -> None:
        """Send the load if it has changed, or nothing was sent for a second. Steps alone are no change."""
        state, last, now = self._source.progress(), self._last_load, time.monotonic()
        is_new = last is None or (state.num_running, state.num_waiting) != (last.num_running, last.num_waiting)
        if not is_new and last is not None:
            figures = (state.num_waiting_tokens, state.num_blocks_used)
            is_due = figures != (last.num_waiting_tokens, last.num_blocks_used)
            if now - self._reported_at < (LOAD_S if is_due else HEARTBEAT_S):
                return
            is_new = is_due
        if state.prices is not None and now - self._priced_at >= PRICES_S:
            self._prices, self._priced_at = state.prices(), now
        load = _load_of(state, self._prices)
        if is_new:
            self._changed_at = now
        if now - self._reported_at >= HEARTBEAT_S:
            self._guard("tick", self._plane.tick)
        self._last_load, self._reported_at = load, now
        report = LoadReport(self._now(), load, self._worker, self._life, [rank.next_seq for rank in self._ranks])
        self._load_seq += 1
        payload = encode_payload(report)
        self._guard("publish", lambda: self._plane.publish(LOAD_TOPIC, self._load_seq - 1, payload))

    def _begin_answer(self, request: ReplayRequest) -> None:
        self._metrics.add("bireme_kv_event_replays_total")
        self._last_load = None  # a new reader wants it before the next sign of life
        if request.client not in self._answers and len(self._answers) >= _MAX_ANSWERS:
            return  # it asks again
        payloads: Iterator[tuple[int, bytes]] = iter(())
        if request.rank < len(self._ranks):
            rank = self._ranks[request.rank]
            if request.start != SNAPSHOT and rank.can_replay(request.start):
                payloads = rank.kept_from(request.start)
            else:
                snapshot = self._snapshot(rank)
                payloads = itertools.chain(snapshot.payloads(), rank.kept_from(snapshot.seq + 1))
        payloads = itertools.chain(payloads, [(END, b"")])
        self._answers[request.client] = _Answer(payloads, next(payloads), time.monotonic())

    def _snapshot(self, rank: _Rank) -> _Snapshot:
        """Return what is held after the last batch sent, or after one from which on all are kept."""
        if rank.snapshot is None or not rank.can_replay(rank.snapshot.seq + 1):
            ts, number = self._now(), rank.number
            events = itertools.chain([AllBlocksCleared()], rank.held.snapshot())
            parts = (encode_payload(EventBatch(ts, part, number)) for part in _portions(events, _SNAPSHOT_WEIGHT))
            rank.snapshot = _Snapshot(rank.next_seq - 1, parts)
        return rank.snapshot

    def _go_on_answering(self) -> None:
        """One payload to each reader that waits, so that none waits for another's snapshot."""
        self._is_answering = False
        now = time.monotonic()
        for client, answer in list(self._answers.items()):
            is_over = now - answer.sent_at > _ANSWER_TIMEOUT_S or answer.next[0] == END
            try:
                if self._plane.answer(client, *answer.next):
                    self._is_answering, answer.sent_at = True, now
                    answer.next = next(answer.payloads, answer.next)
                elif answer.next[0] == END:
                    is_over = False
            except Exception as error:
                logger.info("kv_replay_ended worker=%s error=%s", self._worker, error)
                is_over = True
            if is_over:
                del self._answers[client]
        if not self._answers:
            for rank in self._ranks:
                rank.snapshot = None

    def _now(self) -> float:
        """Return the Unix time, never less than before: readers tell a new life from a late batch by it."""
        self._last_ts = max(self._last_ts, time.time())
        return self._last_ts

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        """No error ends the thread; the first of a row is logged, with its stack unless the plane is just not there."""
        try:
            action()
        except Exception as error:
            self._metrics.add("bireme_kv_event_errors_total", 1, what)
            if not self._had_failed and not self._has_failed:
                tell = logger.warning if isinstance(error, OSError) else logger.exception
                tell("kv_publisher_failed worker=%s at=%s error=%s", self._worker, what, error)
            self._has_failed = True


def _load_of(state: EngineState, prices: WorkerPrices | None) -> WorkerLoad:
    return WorkerLoad(
        state.num_running,
        state.num_waiting,
        state.num_waiting_tokens,
        state.num_blocks_used,
        state.num_blocks,
        state.step,
        prices,
    )


def _portions(events: Iterable[WireEvent], max_weight: int) -> Iterator[list[WireEvent]]:
    part: list[WireEvent] = []
    weight = 0
    for event in events:
        of_event = 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        of_event += len(event.token_ids) if isinstance(event, BlockStored) else 0
        if part and weight + of_event > max_weight:
            yield part
            part, weight = [], 0
        part.append(event)
        weight += of_event
    if part:
        yield part
