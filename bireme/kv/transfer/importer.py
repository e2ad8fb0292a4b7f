"""The importing side: claims leases and writes the rows that come.

Runs on the control thread; only `_write_rows` and `done` run on the copier. A fetch is claimed, then written or failed;
`done` is called once, after the last write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bireme.disagg import DisaggregatedParams
from bireme.discovery import run
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
from bireme.kv.transfer.base import Done, Find, KvLayout, fetch_failure
from bireme.kv.transfer.chunks import Chunk, plan_chunks
from bireme.kv.transfer.copier import Copier
from bireme.kv.transfer.memory import TokenRows
from bireme.kv.transfer.process import Process
from bireme.kv.transfer.shm_file import SharedFile, file_prefix
from bireme.metrics import Registry

logger = logging.getLogger("bireme.kv.transfer")


@dataclass(slots=True, eq=False)
class Peer:
    """One life of an exporting engine."""

    endpoint: str
    process: Process
    socket: Any  # zmq DEALER
    file_prefix: str  # of the files that it may offer

    def send(self, message: wire.Claim | wire.Ack | wire.Cancel) -> None:
        """Never blocks. A message that can't be queued is lost: the timers of both sides cover that."""
        if not self.socket.closed:
            with contextlib.suppress(zmq.Again):
                self.socket.send(wire.encode(message), zmq.NOBLOCK)


class ShmFetch:
    """One fetch; made by ShmTransfer.fetch."""

    def __init__(
        self,
        params: DisaggregatedParams,
        firsts: Sequence[int],
        rows: TokenRows,
        done: Done,
        wake: Callable[[ShmFetch], None],
    ) -> None:
        self.params = params
        self.firsts = tuple(firsts)
        self.rows = rows
        self.number = 0
        self.began_at = time.monotonic()
        self.peer: Peer | None = None
        self.is_writing = False
        self.stopped: BiremeError | None = None  # ends the fetch before its next chunk
        self._done: Done | None = done
        self._wake = wake

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


class Importer:
    def __init__(
        self,
        *,
        layout: KvLayout,
        find: Find,
        timeout_s: float,
        copier: Copier,
        connect: Callable[[str], Any],  # endpoint -> DEALER, which the control loop reads
        disconnect: Callable[[Any], None],
        post: Callable[[Callable[[], None]], object],
        metrics: Registry,
    ) -> None:
        self._layout = layout
        self._find = find
        self._host = run.host_id()
        self._timeout_s = timeout_s
        self._copier = copier
        self._connect = connect
        self._disconnect = disconnect
        self._post = post
        self._metrics = metrics
        self._peers: dict[str, Peer] = {}
        self._fetches: dict[int, ShmFetch] = {}
        self._number = 0

    @property
    def is_idle(self) -> bool:
        return not self._fetches and not self._peers

    def begin(self, fetch: ShmFetch) -> None:
        """Claim. Errors come through `done`."""
        self._number += 1
        fetch.number = self._number
        self._fetches[fetch.number] = fetch
        try:
            fetch.peer = peer = self._find_peer(fetch.params)
            plan_chunks(self._layout, fetch.firsts, fetch.params.num_tokens)
            if fetch.stopped is not None:
                raise fetch.stopped
        except BiremeError as error:
            self._fail(fetch, error)
            return
        peer.send(self._claim(fetch))

    def on_cancelled(self, fetch: ShmFetch) -> None:
        if fetch.number in self._fetches and not fetch.is_writing:
            assert fetch.stopped is not None
            self._fail(fetch, fetch.stopped)

    def on_message(self, payload: bytes) -> None:
        try:
            message = wire.decode_to_importer(payload)
        except msgspec.DecodeError as error:
            logger.warning("transfer event=malformed_message bytes=%d error=%s", len(payload), error)
            return
        fetch = self._fetches.get(message.number)
        if fetch is None or fetch.is_writing:
            return  # cancelled or timed out while the answer was on its way: the exporter has been told
        if isinstance(message, wire.Refuse):
            self._fail(fetch, from_message(message.error), tell=False)
        else:
            fetch.is_writing = True
            self._copier.submit(self._write_rows(fetch, message))

    def tick(self) -> None:
        """Fail the claims whose exporter died or is silent; forget dead peers."""
        dead = {peer.endpoint for peer in self._peers.values() if not peer.process.is_alive()}
        now = time.monotonic()
        for fetch in [fetch for fetch in self._fetches.values() if not fetch.is_writing]:
            assert fetch.peer is not None
            if fetch.peer.endpoint in dead:
                self._fail(fetch, _exporter_lost(fetch), tell=False)
            elif now - fetch.began_at > self._timeout_s:
                self._fail(fetch, _too_late(fetch, self._timeout_s))
        for endpoint in dead:
            self._disconnect(self._peers.pop(endpoint).socket)

    def close(self) -> None:
        """Fail what is claimed; what is being written ends at its next chunk."""
        error = EngineLostError("the decode engine is stopping")
        for fetch in list(self._fetches.values()):
            if fetch.is_writing:
                fetch.stopped = fetch.stopped or error
            else:
                self._fail(fetch, error)

    def _claim(self, fetch: ShmFetch) -> wire.Claim:
        params = fetch.params
        return wire.Claim(
            version=wire.VERSION,
            number=fetch.number,
            lease_id=params.lease_id,
            generation=params.generation,
            life=params.life,
            num_tokens=params.num_tokens,
            layout=self._layout,
            firsts=fetch.firsts,
            pid=os.getpid(),
        )

    def _find_peer(self, params: DisaggregatedParams) -> Peer:
        try:
            record = self._find(params.worker)
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
        if record.host and record.host != self._host:
            raise UnavailableError(
                f"prefill worker {params.worker} is on another host, or in a container of its own: shared memory does"
                " not reach it; serve both on one host, or use engine: trtllm with NIXL"
            )
        peer = self._peers.get(record.transfer_endpoint)
        if peer is None:
            process = Process(record.pid)
            if not process.is_alive():
                raise UnavailableError(f"prefill worker {params.worker} has died; prefill again")
            folder = Path(record.transfer_endpoint.removeprefix("ipc://")).parent  # another launch's has another name
            prefix = file_prefix(folder, record.worker)
            peer = Peer(record.transfer_endpoint, process, self._connect(record.transfer_endpoint), prefix)
            self._peers[peer.endpoint] = peer
        return peer

    def _fail(self, fetch: ShmFetch, error: BiremeError, tell: bool = True) -> None:
        del self._fetches[fetch.number]
        if tell and fetch.peer is not None:
            fetch.peer.send(fetch.cancellation())
        self._count(error)
        self._copier.call(partial(fetch.finish, error))

    def _write_rows(self, fetch: ShmFetch, offer: wire.Offer) -> Iterator[None]:
        """Runs on the copier."""
        error: BiremeError | None = None
        try:
            yield from self._write_file(fetch, offer)
        except BiremeError as failure:
            error = failure
        except Exception as failure:
            logger.exception("transfer event=write_failed")
            error = BiremeError(f"KV rows could not be written: {type(failure).__name__}: {failure}")
        self._post(partial(self._on_written, fetch, offer.num_bytes, error))
        fetch.finish(error)

    def _write_file(self, fetch: ShmFetch, offer: wire.Offer) -> Iterator[None]:
        if not offer.num_bytes:
            return
        plan = plan_chunks(self._layout, fetch.firsts, fetch.params.num_tokens, offer.chunk_bytes)
        if plan.num_bytes != offer.num_bytes:
            raise BiremeError(f"KV transfer: {offer.num_bytes} bytes offered; {plan.num_bytes} were claimed")
        file = self._open(fetch, offer)
        try:
            for chunk in plan.chunks:
                self._write_chunk(fetch, file, chunk)
                yield
        finally:
            file.close()

    def _write_chunk(self, fetch: ShmFetch, file: SharedFile, chunk: Chunk) -> None:
        if fetch.stopped is not None:
            raise fetch.stopped
        file.load(fetch.rows, chunk)

    def _open(self, fetch: ShmFetch, offer: wire.Offer) -> SharedFile:
        assert fetch.peer is not None
        if not offer.file_name.startswith(fetch.peer.file_prefix) or "/" in offer.file_name:
            raise BiremeError("KV transfer: the offer names a file that is not its worker's")
        try:
            return SharedFile.open(offer.file_name, offer.num_bytes)
        except FileNotFoundError as error:
            raise _exporter_lost(fetch) from error

    def _on_written(self, fetch: ShmFetch, num_bytes: int, error: BiremeError | None) -> None:
        del self._fetches[fetch.number]
        assert fetch.peer is not None
        if error is not None:
            fetch.peer.send(fetch.cancellation())
            self._count(error)
            return
        fetch.peer.send(wire.Ack(fetch.params.lease_id, fetch.params.generation))
        self._metrics.add("bireme_kv_transfer_bytes_total", num_bytes, "import")
        self._metrics.observe("bireme_kv_transfer_seconds", time.monotonic() - fetch.began_at, "import")

    def _count(self, error: BiremeError) -> None:
        if not isinstance(error, RequestCancelledError):
            self._metrics.add("bireme_kv_transfer_failures_total", 1, error.code.lower())


def _exporter_lost(fetch: ShmFetch) -> UnavailableError:
    return UnavailableError(f"prefill worker {fetch.params.worker} was lost during the KV transfer; prefill again")


def _too_late(fetch: ShmFetch, timeout_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"prefill worker {fetch.params.worker} offered no KV rows within {timeout_s * 1000:.0f} ms"
        " (cache_transceiver_config.kv_transfer_timeout_ms)"
    )
