"""Rows through files in /dev/shm, between engine processes of one host.

The exporter copies rows into a file, the importer copies them out and says so; then the file takes other rows.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from bireme.errors import BiremeError
from bireme.kv.transfer.backend import PeerAddress
from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.chunks import Chunk, TransferPlan
from bireme.kv.transfer.file_pool import FilePool
from bireme.kv.transfer.memory import RowMemory, TokenRows
from bireme.kv.transfer.shm_file import SharedFile, file_prefix
from bireme.kv.transfer.wire import Claim, Offer, WriteTarget


class ShmBackend:
    name = "shm"
    reaches_other_hosts = False

    def __init__(self, run_dir: Path, worker: str, life: int) -> None:
        self._pool = FilePool(f"{file_prefix(run_dir, worker)}{life}-")

    def start(self, layout: KvLayout, memory: RowMemory | None, limit_bytes: int) -> None:
        self._pool.limit_bytes = limit_bytes

    def open_outlet(self, plan: TransferPlan, claim: Claim) -> ShmOutlet:
        return ShmOutlet(self._pool, self._pool.take(plan.num_bytes))

    def open_inlet(self, plan: TransferPlan, peer: PeerAddress) -> ShmInlet:
        return ShmInlet(peer.file_prefix)

    def forget_peer(self, endpoint: str) -> None:
        """Its supervisor sweeps its files."""

    def forget_writers(self) -> None:
        """Nobody writes to memory of this process."""

    def tidy(self) -> None:
        self._pool.tidy()

    def close(self) -> None:
        self._pool.close()


class ShmOutlet:
    has_loose_writes = False

    def __init__(self, pool: FilePool, file: SharedFile) -> None:
        self._pool, self._file = pool, file
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._file.name

    def show(self, rows: TokenRows) -> None: ...

    def store(self, rows: TokenRows, chunk: Chunk) -> Generator[None, None, None]:
        self._file.store(rows, chunk)
        yield from ()

    def close(self) -> None:
        self._is_closed = True

    def discard(self, is_read: bool) -> None:
        if self._is_closed:
            self._pool.give(self._file, is_read)
        else:  # its copy hangs, and must not find another file under its descriptor
            self._file.unlink()


class ShmInlet:
    target: WriteTarget | None = None
    maps_memory = False

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._file: SharedFile | None = None

    def attach(self, offer: Offer) -> None:
        if not offer.name.startswith(self._prefix) or "/" in offer.name:
            raise BiremeError("KV transfer: the offer names a file that is not its worker's")
        self._file = SharedFile.open(offer.name, offer.num_bytes)

    def load(self, rows: TokenRows, chunk: Chunk) -> None:
        assert self._file is not None
        self._file.load(rows, chunk)

    def wait(self) -> None: ...

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
