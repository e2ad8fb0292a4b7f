"""The importing side: claims leases and takes the rows that come.

Runs on the control thread; only `_load_ready` and `done` run on the copier. `done` is called once, after the last chunk
has been written or the fetch has failed. Memory to which the exporter writes is used again when no write can arrive any
more: the exporter has said so, or the backend has cut off all writers.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from bireme.disagg import DisaggregatedParams
from bireme.discovery.records import WorkerRecord, host_id
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    EngineLostError,
    NotFoundError,
    RequestCancelledError,
    UnavailableError,
    from_message,
)
from bireme.kv.transfer import wire
from bireme.kv.transfer.backend import Backend, Inlet
from bireme.kv.transfer.base import Done, Find, KvLayout, fetch_failure
from bireme.kv.transfer.chunks import TransferPlan, plan_chunks
from bireme.kv.transfer.copier import Copier
from bireme.kv.transfer.costs import TransferCosts
from bireme.kv.transfer.memory import TokenRows
from bireme.kv.transfer.process import FarProcess, Process
from bireme.kv.transfer.shm_file import file_prefix
from bireme.messages import MALFORMED
from bireme.metrics import Registry

PING_S = 0.5
_IDLE_S = 60.0  # without a fetch from it an exporter of another host is forgotten; its next life has another endpoint
GONE_S = 1.0  # how long an exporter that has removed what it offered may take to say why
logger = logging.getLogger("bireme.kv.transfer")


@dataclass(slots=True, eq=False)
class Peer:
    """One life of an exporting engine."""

    endpoint: str
    process: Process | FarProcess
    socket: Any  # zmq DEALER
    file_prefix: str  # of the files that it may offer
    used_at: float = field(default_factory=time.monotonic)  # when a fetch last needed it

    def is_dead(self, now: float, is_busy: bool) -> bool:
        """Whether it has died, or, on another host, is silent, which is nothing for a while if no fetch needs it."""
        may_be_silent = isinstance(self.process, FarProcess) and not is_busy and now - self.used_at <= _IDLE_S
        return not may_be_silent and not self.process.is_alive()

    def ping(self) -> None:
        """Ask whether it is there; of a process of this host that is known."""
        if isinstance(self.process, FarProcess):
            self.send(wire.PeerPing())

    def send(self, message: wire.Claim | wire.Ack | wire.Cancel | wire.PeerPing) -> None:
        """Never blocks. A message that can't be queued is lost: the timers of both sides cover that."""
        if not self.socket.closed:
            with contextlib.suppress(zmq.Again):
                self.socket.send(wire.encode(message), zmq.NOBLOCK)


class FetchState(enum.Enum):
    """Changed by the control thread alone.

    WAITING -> CLAIMED -> OFFERED <-> LOADING -> CONFIRMING -> ENDED
        LOADING -> ENDED: its rows are not mapped        LOADING -> GONE -> ENDED
        any state -> ENDED, or where the exporter writes to memory of this process -> DOUBTED -> ENDED
    """

    WAITING = "waiting"  # for room; it is not claimed yet
    CLAIMED = "claimed"
    OFFERED = "offered"  # it waits for chunks
    LOADING = "loading"  # the copier has it
    GONE = "gone"  # what was offered was not there: its exporter's refusal should be on the way
    CONFIRMING = "confirming"  # its rows are written, and count when the exporter has kept them so long
    DOUBTED = "doubted"  # it ended here, but its exporter may have gone on with it
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class RowFetch:
    """One fetch; made by LeasedTransfer.fetch."""

    params: DisaggregatedParams
    firsts: tuple[int, ...]
    rows: TokenRows
    _done: Done | None
    _wake: Callable[[RowFetch], None]
    backend: str  # its name
    number: int = 0
    began_at: float = field(default_factory=time.monotonic)
    state: FetchState = FetchState.WAITING
    since: float = 0.0  # when it got into its state
    peer: Peer | None = None
    plan: TransferPlan | None = None
    inlet: Inlet | None = None  # None: not claimed
    offer: wire.Offer | None = None
    refusal: wire.Refuse | None = None
    num_ready: int = 0  # chunks that are there
    num_loaded: int = 0  # those whose rows are written
    stopped: BiremeError | None = None  # ends the fetch before its next chunk

    @property
    def has_all(self) -> bool:
        return self.offer is not None and self.plan is not None and self.num_ready == len(self.plan.chunks)

    @property
    def is_safe(self) -> bool:
        """Whether the exporter can do nothing to it any more."""
        return self.has_all and not self.is_mapped and self.state is not FetchState.GONE

    @property
    def is_mapped(self) -> bool:
        """Whether its rows are copied out of the exporter's own memory."""
        return self.offer is not None and self.offer.source is not None

    @property
    def num_bytes(self) -> int:
        return self.plan.num_bytes if self.plan is not None else 0

    @property
    def way(self) -> str:
        return "mapped" if self.is_mapped else self.backend

    @property
    def next_state(self) -> FetchState:
        """The state that follows when the copier has taken what is there."""
        if self.plan is None or self.num_loaded < len(self.plan.chunks):
            return FetchState.OFFERED
        return FetchState.CONFIRMING if self.is_mapped else FetchState.ENDED

    def move(self, state: FetchState) -> None:
        self.state, self.since = state, time.monotonic()

    def cancel(self) -> None:
        """Give up, also before the claim was sent; the exporter is told and frees its blocks at once."""
        if self.stopped is None:
            self.stopped = RequestCancelledError("the KV transfer was cancelled")
            self._wake(self)

    def cancellation(self) -> wire.Cancel:
        return wire.Cancel(self.number, self.params.lease_id, self.params.generation)

    def finish(self, error: BiremeError | None) -> None:
        """Call `done`, once. Runs on the copier."""
        done, self._done = self._done, None
        if done is not None:
            done(error and fetch_failure(error))


@dataclass(kw_only=True, eq=False)
class Importer:
    layout: KvLayout
    find: Find
    timeout_s: float
    backend: Backend
    copier: Copier
    connect: Callable[[str], Any]  # endpoint -> DEALER, which the control loop reads
    disconnect: Callable[[Any], None]
    post: Callable[[Callable[[], None]], object]
    metrics: Registry
    costs: TransferCosts

    def __post_init__(self) -> None:
        self._host = host_id()
        self._peers: dict[str, Peer] = {}
        self._fetches: dict[int, RowFetch] = {}
        self._waiting: deque[RowFetch] = deque()  # for room
        self._in_doubt: dict[int, RowFetch] = {}  # ended here, but their exporter may still write
        self._number = 0
        self._next_ping = 0.0
        for error in (UnavailableError, NotFoundError, DeadlineExceededError):
            self.metrics.start("bireme_kv_transfer_failures_total", labels=(error.code.lower(),))

    @property
    def is_idle(self) -> bool:
        return not self._fetches and not self._peers

    def begin(self, fetch: RowFetch) -> None:
        """Claim, when there is room. Errors come through `done`."""
        self._number += 1
        fetch.number = self._number
        self._fetches[fetch.number] = fetch
        try:
            fetch.peer = self._find_peer(fetch.params)
            fetch.plan = plan_chunks(self._layout_of(fetch), fetch.firsts, fetch.params.num_tokens)
            if fetch.stopped is not None:
                raise fetch.stopped
        except (BiremeError, zmq.ZMQError) as error:  # no descriptor, or no socket, is left
            text = f"KV transfer: no connection to prefill worker {fetch.params.worker}: {error}; prefill again"
            self._fail(fetch, error if isinstance(error, BiremeError) else UnavailableError(text))
            return
        self._waiting.append(fetch)
        self._claim_waiting()

    def on_cancelled(self, fetch: RowFetch) -> None:
        if fetch.number in self._fetches and fetch.stopped is not None:
            self._stop(fetch, fetch.stopped)

    def on_message(self, socket: Any, payload: bytes) -> None:
        try:
            message = wire.decode_to_importer(payload)
        except MALFORMED as error:
            logger.warning("transfer event=malformed_message bytes=%d error=%s", len(payload), error)
            return
        peer = next((peer for peer in self._peers.values() if peer.socket is socket), None)
        if peer is None:
            return
        peer.process.note_message()
        if isinstance(message, wire.PeerPong):
            return
        fetch = self._fetches.get(message.number)
        if fetch is None or fetch.peer is not peer:
            self._on_late_message(peer, message)
        else:
            self._on_answer(fetch, message)

    def _on_answer(self, fetch: RowFetch, message: wire.Offer | wire.Progress | wire.Kept | wire.Refuse) -> None:
        match message:
            case wire.Offer():
                self._on_offer(fetch, message)
            case wire.Progress():
                self._on_progress(fetch, message)
            case wire.Kept() if fetch.state is FetchState.CONFIRMING:
                self.copier.call(partial(fetch.finish, None))
                self._complete(fetch)
            case wire.Refuse():
                self._on_refused(fetch, message)

    def tick(self) -> None:
        """Fail the fetches whose exporter died or is silent; forget dead peers, and far ones that nobody needs."""
        now = time.monotonic()
        busy = self._busy_peers()
        for peer in busy:
            peer.used_at = now
        if now >= self._next_ping:
            self._next_ping = now + PING_S
            for peer in busy:
                peer.ping()
        dead = [peer for peer in self._peers.values() if peer.is_dead(now, peer in busy)]
        for fetch in list(self._fetches.values()):
            if (error := self._lapse(fetch, fetch.peer in dead, now)) is not None:
                self._stop(fetch, error)
        for peer in dead:
            self.disconnect(self._peers.pop(peer.endpoint).socket)
            self.copier.call(partial(self.backend.forget_peer, peer.endpoint))
        self._settle_doubts()

    def _lapse(self, fetch: RowFetch, is_orphaned: bool, now: float) -> BiremeError | None:
        """Return why the fetch can't go on by itself; None: it can, or ends already."""
        if fetch.is_safe or fetch.stopped is not None:
            return None
        if is_orphaned or (fetch.state is FetchState.GONE and now - fetch.since > GONE_S):
            return _exporter_lost(fetch)
        return _too_late(fetch, self.timeout_s) if now - fetch.began_at > self.timeout_s else None

    def close(self) -> None:
        """Fail what is claimed; what is being written ends at its next chunk."""
        error = EngineLostError("the decode engine is stopping")
        for fetch in list(self._fetches.values()):
            self._stop(fetch, error)

    def _busy_peers(self) -> set[Peer]:
        fetches = (*self._fetches.values(), *self._in_doubt.values())
        return {fetch.peer for fetch in fetches if fetch.peer is not None}

    def _claim_waiting(self) -> None:
        while self._waiting:
            fetch = self._waiting[0]
            assert fetch.plan is not None and fetch.peer is not None
            try:
                fetch.inlet = self.backend.open_inlet(fetch.plan, fetch.peer)
            except BiremeError as error:
                self._fail(fetch, error)
                continue
            if fetch.inlet is None:
                return
            self._waiting.popleft()
            fetch.move(FetchState.CLAIMED)
            fetch.peer.send(self._claim(fetch))

    def _claim(self, fetch: RowFetch) -> wire.Claim:
        params = fetch.params
        return wire.Claim(
            version=wire.VERSION,
            number=fetch.number,
            lease_id=params.lease_id,
            generation=params.generation,
            life=params.life,
            num_tokens=params.num_tokens,
            layout=self._layout_of(fetch),
            firsts=fetch.firsts,
            pid=os.getpid(),
            host=self._host,
            backend=self.backend.name,
            target=fetch.inlet.target if fetch.inlet is not None else None,
            maps_memory=fetch.inlet is not None and fetch.inlet.maps_memory and self.backend.can_map(fetch.rows),
        )

    def _layout_of(self, fetch: RowFetch) -> KvLayout:
        return self.layout.of(len(fetch.firsts))

    def _record(self, params: DisaggregatedParams) -> WorkerRecord:
        """Return the record of the life that has the lease. Raises UnavailableError, NotFoundError."""
        try:
            record = self.find(params.worker)
        except NotFoundError as error:
            raise UnavailableError(f"prefill worker {params.worker} is not running; prefill again") from error
        if record.life < params.life:
            raise UnavailableError(
                f"life {params.life} of prefill worker {params.worker} is not known yet; prefill again"
            )
        if record.life != params.life:
            raise NotFoundError(
                f"the KV lease belongs to life {params.life} of {params.worker}, which now lives {record.life}:"
                " prefill again"
            )
        if not record.transfer_endpoint:
            raise UnavailableError(f"worker {params.worker} does not export KV: set cache_transceiver_config.backend")
        return record

    def _find_peer(self, params: DisaggregatedParams) -> Peer:
        record = self._record(params)
        is_near = not record.host or record.host == self._host
        if not is_near and not (self.backend.reaches_other_hosts and record.transfer_endpoint.startswith("tcp://")):
            raise UnavailableError(
                f"prefill worker {params.worker} is on another host, or in a container of its own: shared memory does"
                " not reach it; set cache_transceiver_config.backend: NIXL on both, or serve both on one host"
            )
        peer = self._peers.get(record.transfer_endpoint)
        if peer is None:
            process = Process(record.pid) if is_near else FarProcess(record.pid)
            if not process.is_alive():
                raise UnavailableError(f"prefill worker {params.worker} has died; prefill again")
            folder = Path(record.transfer_endpoint.removeprefix("ipc://")).parent  # another launch's has another name
            prefix = file_prefix(folder, record.worker)
            peer = Peer(record.transfer_endpoint, process, self.connect(record.transfer_endpoint), prefix)
            self._peers[peer.endpoint] = peer
        elif peer not in self._busy_peers():
            peer.process.note_message()  # nobody has asked it since
        return peer

    def _on_offer(self, fetch: RowFetch, offer: wire.Offer) -> None:
        if fetch.state is not FetchState.CLAIMED:
            return
        fetch.offer = offer
        fetch.move(FetchState.OFFERED)
        fetch.plan = plan_chunks(self._layout_of(fetch), fetch.firsts, fetch.params.num_tokens, offer.chunk_bytes)
        if fetch.plan.num_bytes != offer.num_bytes:
            text = f"KV transfer: {offer.num_bytes} bytes offered; {fetch.plan.num_bytes} were claimed"
            self._fail(fetch, BiremeError(text))
        elif not fetch.plan.chunks:
            self._load(fetch)

    def _on_progress(self, fetch: RowFetch, progress: wire.Progress) -> None:
        if fetch.offer is None or fetch.plan is None:
            return
        fetch.num_ready = max(fetch.num_ready, min(progress.num_chunks, len(fetch.plan.chunks)))
        if fetch.state is FetchState.OFFERED:
            self._load(fetch)

    def _on_refused(self, fetch: RowFetch, refusal: wire.Refuse) -> None:
        fetch.refusal = refusal
        if fetch.is_safe:  # it comes too late to matter, unless the copier finds what was offered gone
            return
        error = from_message(refusal.error)
        fetch.peer = None  # nothing to tell it any more
        self._stop(fetch, error)
        if isinstance(error, UnavailableError) and not any(one.inlet for one in self._fetches.values()):
            self.backend.forget_writers()  # it may have an address of ours that is none, or was read wrongly

    def _on_late_message(self, peer: Peer, message: wire.Offer | wire.Progress | wire.Kept | wire.Refuse) -> None:
        """A fetch that ended here: has the exporter finished with it too?"""
        fetch = self._in_doubt.get(message.number)
        if fetch is None or fetch.peer is not peer:
            return
        if isinstance(message, wire.Offer):
            fetch.plan = plan_chunks(self._layout_of(fetch), fetch.firsts, fetch.params.num_tokens, message.chunk_bytes)
        is_last = isinstance(message, wire.Progress) and fetch.plan and message.num_chunks == len(fetch.plan.chunks)
        if isinstance(message, wire.Refuse) and message.has_loose_writes:
            fetch.peer = None
        elif is_last or isinstance(message, wire.Refuse):
            del self._in_doubt[fetch.number]
            self._close_inlet(fetch)

    def _stop(self, fetch: RowFetch, error: BiremeError) -> None:
        """End it now, or before the copier's next chunk."""
        if fetch.state is FetchState.LOADING:
            fetch.stopped = fetch.stopped or error
        else:
            self._fail(fetch, error)

    def _fail(self, fetch: RowFetch, error: BiremeError) -> None:
        self._remove(fetch)
        self._count(error)
        self.copier.call(partial(fetch.finish, error))

    def _remove(self, fetch: RowFetch) -> None:
        """Forget a fetch that has failed; tell its exporter, unless that one said so itself or is gone."""
        del self._fetches[fetch.number]
        with contextlib.suppress(ValueError):
            self._waiting.remove(fetch)
        if fetch.peer is not None:
            fetch.peer.send(fetch.cancellation())
        has_stopped_there = fetch.has_all or (fetch.refusal is not None and not fetch.refusal.has_loose_writes)
        if fetch.inlet is not None and fetch.inlet.target is not None and not has_stopped_there:
            fetch.move(FetchState.DOUBTED)
            self._in_doubt[fetch.number] = fetch
            return
        self._close_inlet(fetch)

    def _close_inlet(self, fetch: RowFetch) -> None:
        fetch.move(FetchState.ENDED)
        if fetch.inlet is not None:
            fetch.inlet.close()
            self._claim_waiting()

    def _settle_doubts(self) -> None:
        """Use the memory again to which peers that have given up, are gone, or never say that they have ended, may have
        been writing.

        Cutting them off would end the transfers under way. Those end soon if room is short: who waits for it lets
        nobody pass.
        """
        long_ago = time.monotonic() - 2 * self.timeout_s  # what a peer said is lost where its connection was cut
        orphans = [
            fetch
            for fetch in self._in_doubt.values()
            if fetch.peer not in self._peers.values() or fetch.since < long_ago
        ]
        if not orphans or any(fetch.inlet is not None for fetch in self._fetches.values()):
            return
        logger.warning("transfer event=writers_cut_off transfers=%d", len(orphans))
        self.backend.forget_writers()
        for fetch in orphans:
            del self._in_doubt[fetch.number]
            self._close_inlet(fetch)

    def _load(self, fetch: RowFetch) -> None:
        fetch.move(FetchState.LOADING)
        self.copier.submit(self._load_ready(fetch))

    def _load_ready(self, fetch: RowFetch) -> Iterator[None]:
        """Runs on the copier: take the chunks that are there."""
        error: BiremeError | None = None
        state = FetchState.ENDED
        try:
            state = yield from self._load_chunks(fetch)
        except BiremeError as failure:
            error = failure
        except Exception as failure:
            logger.exception("transfer event=write_failed")
            error = BiremeError(f"KV rows could not be written: {type(failure).__name__}: {failure}")
        self.post(partial(self._on_loaded, fetch, state, error))
        if state is FetchState.ENDED:
            fetch.finish(error)

    def _load_chunks(self, fetch: RowFetch) -> Generator[None, None, FetchState]:
        """Return the state that follows."""
        assert fetch.inlet is not None and fetch.offer is not None and fetch.plan is not None
        if fetch.plan.chunks and not fetch.num_loaded:
            try:
                fetch.inlet.attach(fetch.offer)
            except FileNotFoundError:
                return FetchState.GONE
        try:
            while fetch.stopped is None and fetch.num_loaded < fetch.num_ready:
                fetch.inlet.load(fetch.rows, fetch.plan.chunks[fetch.num_loaded])
                fetch.num_loaded += 1
                yield
            if fetch.stopped is not None:
                raise fetch.stopped
        finally:
            fetch.inlet.wait()
        return fetch.next_state

    def _on_loaded(self, fetch: RowFetch, state: FetchState, error: BiremeError | None) -> None:
        """The copier has taken what was there."""
        fetch.move(state)
        if error is not None:
            self._remove(fetch)
            self._count(error)
        elif fetch.stopped is not None and state is not FetchState.ENDED:
            self._fail(fetch, fetch.stopped)
        elif state is FetchState.OFFERED:
            if fetch.num_loaded < fetch.num_ready:
                self._load(fetch)
        elif state is FetchState.GONE:
            if fetch.refusal is not None:
                self._on_refused(fetch, fetch.refusal)
        else:
            self._acknowledge(fetch)

    def _acknowledge(self, fetch: RowFetch) -> None:
        """All rows are written; those that are mapped count when the exporter says that it kept them."""
        assert fetch.peer is not None
        lease_id, generation = fetch.params.lease_id, fetch.params.generation
        fetch.peer.send(wire.Ack(lease_id, generation, fetch.number if fetch.is_mapped else 0))
        if not fetch.is_mapped:
            self._complete(fetch)

    def _complete(self, fetch: RowFetch) -> None:
        assert fetch.plan is not None
        del self._fetches[fetch.number]
        if not fetch.params.is_canary:
            self.metrics.add("bireme_kv_transfer_bytes_total", fetch.plan.num_bytes, "import")
            seconds = time.monotonic() - fetch.began_at
            self.metrics.observe("bireme_kv_transfer_seconds", seconds, "import")
            if (num_tokens := fetch.params.num_tokens - min(fetch.firsts)) > 0:
                self.costs.add(num_tokens, seconds)
        self._close_inlet(fetch)

    def _count(self, error: BiremeError) -> None:
        if not isinstance(error, RequestCancelledError):
            self.metrics.add("bireme_kv_transfer_failures_total", 1, error.code.lower())


def _exporter_lost(fetch: RowFetch) -> UnavailableError:
    return UnavailableError(f"prefill worker {fetch.params.worker} was lost during the KV transfer; prefill again")


def _too_late(fetch: RowFetch, timeout_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"prefill worker {fetch.params.worker} did not send all KV rows within {timeout_s * 1000:.0f} ms"
        " (cache_transceiver_config.kv_transfer_timeout_ms)"
    )
