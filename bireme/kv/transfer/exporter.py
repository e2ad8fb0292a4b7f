"""The exporting side: answers claims with rows.

Runs on the control thread; only `_copy` runs on the copier. A refusal is sent when the copier has stopped: the importer
may then use the memory that was written to.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from bireme.discovery.records import host_id
from bireme.errors import (
    BiremeError,
    DeadlineExceededError,
    NotFoundError,
    RequestCancelledError,
    RequestError,
    ResourceExhaustedError,
    UnavailableError,
    to_message,
)
from bireme.kv.transfer import wire
from bireme.kv.transfer.backend import Backend, RowOutlet
from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.buffer import TransferBuffer
from bireme.kv.transfer.chunks import Chunk, TransferPlan, plan_chunks
from bireme.kv.transfer.copier import Copier
from bireme.kv.transfer.lease import LeaseState, LeaseTable, TableLease
from bireme.kv.transfer.memory import TokenRows
from bireme.kv.transfer.process import FarProcess, Process
from bireme.messages import MALFORMED
from bireme.metrics import Registry

ABORT_GRACE_S = 1.0  # for a chunk under way: one that is given up takes its connection with it
logger = logging.getLogger("bireme.kv.transfer")


class LeaseStage(enum.Enum):
    """Changed by the control thread alone.

    WAITING <-> COPYING -> COPIED -> ENDED
        WAITING -> ENDED        COPYING -> ENDING -> ENDED
    """

    WAITING = "waiting"  # for room in the buffer
    COPYING = "copying"
    COPIED = "copied"
    ENDING = "ending"  # the copy stops at the next chunk
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Outgoing:
    """One claimed lease on its way to its importer."""

    identity: bytes
    claim: wire.Claim
    lease: TableLease
    plan: TransferPlan
    chunk_bytes: int
    importer: Process | FarProcess
    began_at: float = field(default_factory=time.monotonic)
    stage: LeaseStage = LeaseStage.WAITING
    outlet: RowOutlet | None = None
    source: wire.RowSource | None = None  # the importer copies the rows: they are pinned to the end
    is_read: bool = False  # the importer has said that it reads no more
    refusal: BiremeError | None = None  # for the importer, once the copy has stopped
    num_ended_before: int = 0  # transfers that had ended when this one was admitted

    @property
    def number(self) -> int:
        return self.claim.number

    @property
    def is_over(self) -> bool:
        return self.stage in (LeaseStage.ENDING, LeaseStage.ENDED)

    @property
    def is_out(self) -> bool:
        """Whether all rows are where nothing that happens here can touch them."""
        return self.stage is LeaseStage.COPIED and self.source is None


@dataclass(kw_only=True, eq=False)
class Exporter:
    layout: KvLayout
    life: int
    backend: Backend
    table: LeaseTable
    buffer: TransferBuffer[Outgoing]
    copier: Copier
    reply: Callable[[bytes, bytes], bool]  # identity, message; False: the importer is not connected
    post: Callable[[Callable[[], None]], object]  # run on the control thread
    metrics: Registry
    chunk_bytes: int

    def __post_init__(self) -> None:
        self._host = host_id()
        self._outgoing: dict[int, Outgoing] = {}  # by lease id
        self._num_ended = 0
        self.metrics.start("bireme_kv_leases_expired_total")
        for cause in ("timeout", "importer_lost"):
            self.metrics.start("bireme_kv_transfer_failures_total", labels=(cause,))

    @property
    def is_idle(self) -> bool:
        return not self._outgoing and not self.table

    def on_message(self, identity: bytes, payload: bytes) -> None:
        try:
            message = wire.decode_to_exporter(payload)
        except MALFORMED as error:
            logger.warning("transfer event=malformed_message bytes=%d error=%s", len(payload), error)
            return
        if isinstance(message, wire.Claim):
            self._on_claim(identity, message)
        elif isinstance(message, wire.PeerPing):
            self._on_ping(identity)
        elif isinstance(message, wire.Ack):
            self._on_ack(identity, message)
        else:
            self._on_cancel(identity, message)

    def tick(self) -> None:
        """Expire leases; end the transfers whose lease or importer is gone."""
        for expired in self.table.expire():
            self._on_expired(expired.lease, expired.was)
        for transfer in list(self._outgoing.values()):
            if transfer.is_over:
                continue
            if transfer.lease.state is not LeaseState.CLAIMED:
                self._end(transfer, _aborted())
            elif not transfer.importer.is_alive():
                self._lose(transfer)

    def publish(self) -> None:
        for state, count in self.table.counts().items():
            self.metrics.set("bireme_kv_leases", count, state.value)
        self.metrics.set("bireme_kv_transfer_buffer_bytes", self.buffer.used_bytes)

    def close(self) -> None:
        """Refuse what waits and stop the copies; files are removed when the copier has ended."""
        self.table.close()
        for transfer in list(self._outgoing.values()):
            self._end(transfer, None if transfer.is_out else UnavailableError("the prefill engine is stopping"))

    def discard_all(self) -> None:
        for transfer in self._outgoing.values():
            if transfer.outlet:
                transfer.outlet.discard(is_read=False)

    def _on_ping(self, identity: bytes) -> None:
        for transfer in self._outgoing.values():
            if transfer.identity == identity:
                transfer.importer.note_message()
        self.reply(identity, wire.encode(wire.PeerPong()))

    def _on_claim(self, identity: bytes, claim: wire.Claim) -> None:
        try:
            lease = self._claim_lease(claim)
        except BiremeError as error:
            self._refuse(identity, claim.number, error)
            return
        rows = lease.rows
        if claim.maps_memory and rows is not None and not self.backend.can_map(rows):
            claim = msgspec.structs.replace(claim, maps_memory=False)
        chunk_bytes = self.backend.chunk_bytes(claim, self.chunk_bytes)
        try:
            plan = self._plan(claim, lease, chunk_bytes)
        except BiremeError as error:
            lease.abort()  # a lease serves one request, and that one can't have it
            self._refuse(identity, claim.number, error)
            return
        is_near = claim.host in ("", self._host)
        importer = Process(claim.pid) if is_near else FarProcess(claim.pid)
        transfer = Outgoing(identity, claim, lease, plan, chunk_bytes, importer)
        self._outgoing[lease.lease_id] = transfer
        if plan.num_bytes:
            self.buffer.enqueue(transfer, plan.num_bytes)
            self._admit()
        else:
            transfer.stage = LeaseStage.COPIED
            self._offer(transfer)

    def _claim_lease(self, claim: wire.Claim) -> TableLease:
        if claim.version != wire.VERSION:
            raise RequestError(
                f"KV transfer protocol: decode speaks version {claim.version}, prefill {wire.VERSION};"
                " run the same bireme on both"
            )
        if claim.life != self.life:
            raise NotFoundError(
                f"the KV lease belongs to life {claim.life} of the prefill engine; this is {self.life}: prefill again"
            )
        return self.table.claim(claim.lease_id, claim.generation)

    def _plan(self, claim: wire.Claim, lease: TableLease, chunk_bytes: int) -> TransferPlan:
        if claim.backend != self.backend.name:
            raise RequestError(
                f"cache_transceiver_config.backend: decode has {claim.backend} and prefill {self.backend.name};"
                " give both the same"
            )
        check_layouts(self.layout, claim.layout)
        if claim.num_tokens != lease.num_tokens:
            raise RequestError(f"num_tokens: {claim.num_tokens} claimed; the lease holds {lease.num_tokens}")
        plan = plan_chunks(claim.layout, claim.firsts, lease.num_tokens, chunk_bytes)
        self.buffer.check(plan)
        return plan

    def _on_ack(self, identity: bytes, ack: wire.Ack) -> None:
        transfer = self._find(ack.lease_id, ack.generation)
        if transfer is None or transfer.stage is not LeaseStage.COPIED:
            logger.info("transfer event=late_ack")
            if ack.number:  # what it has read may be another request's
                self._refuse(identity, ack.number, self.table.gone(ack.lease_id, ack.generation))
            return
        transfer.is_read = transfer.identity == identity
        is_kept = transfer.lease.ack()
        if is_kept:
            if not transfer.lease.is_canary:
                self.metrics.observe("bireme_kv_transfer_seconds", time.monotonic() - transfer.began_at, "export")
            if ack.number:
                self.reply(identity, wire.encode(wire.Kept(ack.number)))
        self._end(transfer, None if is_kept or not ack.number else _aborted())

    def _on_cancel(self, identity: bytes, cancel: wire.Cancel) -> None:
        transfer = self._find(cancel.lease_id, cancel.generation)
        if transfer is not None and (transfer.identity, transfer.number) != (identity, cancel.number):
            return  # a replay; the first claim goes on
        lease = self.table.find(cancel.lease_id, cancel.generation)
        if lease is not None:
            lease.abort()
        if transfer is not None:
            transfer.is_read = True  # who gives up has stopped before it says so
            self._end(transfer, RequestCancelledError("the KV transfer was cancelled"))

    def _on_expired(self, lease: TableLease, was: LeaseState) -> None:
        if was is LeaseState.EXPORTED:
            self.metrics.add("bireme_kv_leases_expired_total")
        transfer = self._outgoing.get(lease.lease_id)
        if transfer is None:
            return
        self.metrics.add("bireme_kv_transfer_failures_total", 1, "timeout")
        late = DeadlineExceededError(
            "the KV rows were not copied in time; raise cache_transceiver_config.kv_transfer_timeout_ms"
            if transfer.source is not None
            else "no room in the KV transfer buffer in time; raise cache_transceiver_config.max_tokens_in_buffer"
            " or kv_transfer_timeout_ms"
        )
        self._end(transfer, None if transfer.is_out else late)

    def _lose(self, transfer: Outgoing) -> None:
        logger.warning("transfer event=importer_lost pid=%d stage=%s", transfer.importer.pid, transfer.stage.value)
        self.metrics.add("bireme_kv_transfer_failures_total", 1, "importer_lost")
        transfer.lease.abort()
        self._end(transfer)

    def _find(self, lease_id: int, generation: int) -> Outgoing | None:
        transfer = self._outgoing.get(lease_id)
        return transfer if transfer is not None and transfer.lease.generation == generation else None

    def _admit(self) -> None:
        while (transfer := self.buffer.admit()) is not None:
            transfer.stage = LeaseStage.COPYING
            transfer.num_ended_before = self._num_ended
            if self.backend.is_shown(transfer.claim):  # nothing is copied here, and a change of threads costs time
                for _ in self._copy(transfer):
                    pass
            else:
                self.copier.submit(self._copy(transfer))

    def _copy(self, transfer: Outgoing) -> Iterator[None]:
        """Make the outlet, send chunk by chunk, tell the control thread; on the copier if there is anything to copy."""
        error: BiremeError | None = None
        try:
            if transfer.is_over:
                return
            transfer.outlet = self.backend.open_outlet(transfer.plan, transfer.claim)
            yield from self._send(transfer, transfer.outlet)
        except BiremeError as failure:
            error = failure
        except Exception as failure:
            logger.exception("transfer event=read_failed")
            error = BiremeError(f"KV rows could not be read: {type(failure).__name__}: {failure}")
        finally:
            self.post(partial(self._on_copied, transfer, error))

    def _send(self, transfer: Outgoing, outlet: RowOutlet) -> Iterator[None]:
        lease = transfer.lease
        rows = lease.begin_copy()
        try:
            if rows is None:
                raise _aborted()
            transfer.source = outlet.show(rows)
            self.post(partial(self._offer, transfer))
            chunks = transfer.plan.chunks if transfer.source is None else ()
            for count, chunk in enumerate(chunks, start=1):
                yield from _store(lease, outlet, rows, chunk)
                if count < len(chunks):  # the last is told when nothing is left to do here
                    self.post(partial(self._tell, transfer, count))
                    yield
        finally:
            if transfer.source is None:
                lease.end_copy()
            outlet.close()

    def _tell(self, transfer: Outgoing, num_chunks: int) -> None:
        if not transfer.is_over:
            self.reply(transfer.identity, wire.encode(wire.Progress(transfer.number, num_chunks)))

    def _on_copied(self, transfer: Outgoing, error: BiremeError | None) -> None:
        is_over = transfer.is_over
        transfer.stage = LeaseStage.COPIED  # in any case: the copier has finished with it
        if is_over:
            self._end(transfer)
        elif error is None:
            if not transfer.lease.is_canary:
                self.metrics.add("bireme_kv_transfer_bytes_total", transfer.plan.num_bytes, "export")
            transfer.lease.restart_timer()
            self._tell(transfer, len(transfer.plan.chunks))
        elif isinstance(error, ResourceExhaustedError) and self._may_find_room(transfer):
            self._wait_again(transfer)
        else:
            if transfer.lease.state is LeaseState.CLAIMED:  # otherwise prefill itself aborted it
                self.metrics.add("bireme_kv_transfer_failures_total", 1, error.code.lower())
            transfer.lease.abort()
            self._end(transfer, error)

    def _may_find_room(self, transfer: Outgoing) -> bool:
        """Whether the missing room is, or was, held by other transfers: /dev/shm is smaller than the buffer."""
        return self.buffer.used_bytes > transfer.plan.num_bytes or self._num_ended > transfer.num_ended_before

    def _wait_again(self, transfer: Outgoing) -> None:
        transfer.stage = LeaseStage.WAITING
        self.buffer.put_back(transfer, transfer.plan.num_bytes)
        if not self.buffer.used_bytes:
            self._admit()

    def _offer(self, transfer: Outgoing) -> None:
        if transfer.is_over:
            return
        name = transfer.outlet.name if transfer.outlet else ""
        offer = wire.Offer(transfer.number, name, transfer.plan.num_bytes, transfer.chunk_bytes, transfer.source)
        if not self.reply(transfer.identity, wire.encode(offer)):
            self._lose(transfer)

    def _refuse(self, identity: bytes, number: int, error: BiremeError, has_loose_writes: bool = False) -> None:
        logger.info("transfer event=refused error=%s", error)
        self.reply(identity, wire.encode(wire.Refuse(number, to_message(error), has_loose_writes)))

    def _end(self, transfer: Outgoing, refusal: BiremeError | None = None) -> None:
        """Free room and outlet and refuse the claim, now or when the copier reaches the next chunk."""
        transfer.refusal = transfer.refusal or refusal
        if transfer.stage in (LeaseStage.COPYING, LeaseStage.ENDING):
            transfer.stage = LeaseStage.ENDING
            return
        was, transfer.stage = transfer.stage, LeaseStage.ENDED
        self._num_ended += 1
        del self._outgoing[transfer.lease.lease_id]
        if was is LeaseStage.WAITING:
            self.buffer.withdraw(transfer)
        else:
            self.buffer.free(transfer.plan.num_bytes)
        if transfer.outlet:
            transfer.outlet.discard(transfer.is_read)
        if transfer.source is not None:  # what the importer reads from now on counts for nothing
            transfer.lease.end_copy()
        if transfer.refusal is not None:
            has_loose_writes = transfer.outlet is not None and transfer.outlet.has_loose_writes
            self._refuse(transfer.identity, transfer.number, transfer.refusal, has_loose_writes)
        self._admit()


def _store(lease: TableLease, outlet: RowOutlet, rows: TokenRows, chunk: Chunk) -> Iterator[None]:
    """Send a chunk; one that is on its way when the lease ends has ABORT_GRACE_S to end. Raises NotFoundError."""
    if lease.state is not LeaseState.CLAIMED:
        raise _aborted()  # a chunk that is not whole must never count as there
    aborted_at = 0.0
    with contextlib.closing(outlet.store(rows, chunk)) as parts:
        for _ in parts:
            if lease.state is not LeaseState.CLAIMED:
                aborted_at = aborted_at or time.monotonic()
                if time.monotonic() - aborted_at > ABORT_GRACE_S:
                    raise _aborted()
            yield


def _aborted() -> NotFoundError:
    return NotFoundError("the KV lease was aborted by prefill; prefill again")


def check_layouts(exporter: KvLayout, importer: KvLayout) -> None:
    """Raise RequestError naming the first field in which the two sides differ.

    An importer's layout has a head's group only where it wants its rows.
    """
    exporter = exporter.of(len(importer.groups))
    differences = [
        ("model", exporter.model, importer.model),
        ("dtype", exporter.dtype, importer.dtype),
        ("head", exporter.head, importer.head),
        ("number of groups", len(exporter.groups), len(importer.groups)),
    ]
    for index, (first, second) in enumerate(zip(exporter.groups, importer.groups, strict=False)):
        differences.append((f"groups[{index}].window", first.window, second.window))
        differences.append((f"groups[{index}].row_bytes", first.row_bytes, second.row_bytes))
    for index, scales in enumerate(zip(exporter.scales, importer.scales, strict=False)):
        differences.append((f"scales[{index}]", *scales))
    for name, ours, theirs in differences:
        if ours != theirs:
            raise RequestError(
                f"KV layout: {name} is {ours} on prefill and {theirs} on decode; serve the same model and"
                " kv_cache_config on both"
            )
