"""Rows through files in /dev/shm, between engine processes of one host.

The exporter copies rows into a fresh file, the importer copies them out, the exporter unlinks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path

from bireme.errors import BiremeError
from bireme.kv.transfer.backend import PeerAddress
from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.chunks import Chunk, TransferPlan
from bireme.kv.transfer.memory import RowMemory, TokenRows
from bireme.kv.transfer.shm_file import SharedFile, file_prefix
from bireme.kv.transfer.wire import Claim, Offer, WriteTarget


class ShmBackend:
    name = "shm"
    reaches_other_hosts = False

    def __init__(self, run_dir: Path, worker: str, life: int) -> None:
        prefix, count = file_prefix(run_dir, worker), itertools.count()
        self._next_name = lambda: f"{prefix}{life}-{next(count)}"

    def start(self, layout: KvLayout, memory: RowMemory | None, limit_bytes: int) -> None:
        """Nothing is made before the first transfer."""

    def open_outlet(self, plan: TransferPlan, claim: Claim) -> ShmOutlet:
        return ShmOutlet(SharedFile.create(self._next_name, plan.num_bytes))

    def open_inlet(self, plan: TransferPlan, peer: PeerAddress) -> ShmInlet:
        return ShmInlet(peer.file_prefix)

    def forget_peer(self, endpoint: str) -> None:
        """Its supervisor sweeps its files."""

    def forget_writers(self) -> None:
        """Nobody writes to memory of this process."""

    def close(self) -> None: ...


class ShmOutlet:
    has_loose_writes = False

    def __init__(self, file: SharedFile) -> None:
        self._file = file

    @property
    def name(self) -> str:
        return self._file.name

    def show(self, rows: TokenRows) -> None: ...

    def store(self, rows: TokenRows, chunk: Chunk) -> Generator[None, None, None]:
        self._file.store(rows, chunk)
        yield from ()

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
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
