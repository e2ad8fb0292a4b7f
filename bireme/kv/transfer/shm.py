"""Rows through files in /dev/shm, between engine processes of one host.

The exporter copies rows into a file, the importer copies them out and says so; then the file takes other rows.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path

from bireme.errors import BiremeError
from bireme.kv.transfer.backend import Backend, Inlet, PeerAddress, RowOutlet
from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.chunks import Chunk, TransferPlan
from bireme.kv.transfer.file_pool import FilePool
from bireme.kv.transfer.memory import RowMemory, TokenRows
from bireme.kv.transfer.shm_file import SharedFile, file_prefix
from bireme.kv.transfer.wire import Claim, Offer


class ShmBackend(Backend):
    name = "shm"

    def __init__(self, run_dir: Path, worker: str, life: int) -> None:
        self._pool = FilePool(f"{file_prefix(run_dir, worker)}{life}-")
        self._opened = OpenedFiles()

    def start(self, layout: KvLayout, memory: RowMemory | None, limit_bytes: int) -> None:
        self._pool.limit_bytes = limit_bytes

    def open_outlet(self, plan: TransferPlan, claim: Claim) -> ShmOutlet:
        return ShmOutlet(self._pool, self._pool.take(plan.num_bytes))

    def open_inlet(self, plan: TransferPlan, peer: PeerAddress) -> ShmInlet:
        return ShmInlet(self._opened, peer.file_prefix)

    def tidy(self) -> None:
        self._pool.tidy()
        self._opened.tidy()

    def close(self) -> None:
        self._pool.close()
        self._opened.close()


class ShmOutlet(RowOutlet):
    def __init__(self, pool: FilePool, file: SharedFile) -> None:
        self._pool, self._file, self.name = pool, file, file.name
        self._is_closed = False

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


class ShmInlet(Inlet):
    def __init__(self, opened: OpenedFiles, prefix: str) -> None:
        self._opened, self._prefix = opened, prefix
        self._file: SharedFile | None = None

    def attach(self, offer: Offer) -> None:
        if not offer.name.startswith(self._prefix) or "/" in offer.name:
            raise BiremeError("KV transfer: the offer names a file that is not its worker's")
        self._file = self._opened.take(offer.name, offer.num_bytes)

    def load(self, rows: TokenRows, chunk: Chunk) -> None:
        assert self._file is not None
        self._file.load(rows, chunk)

    def close(self) -> None:
        if self._file is not None:
            self._opened.give(self._file)
            self._file = None


class OpenedFiles:
    """Exporters' files that were read and that these use again: they stay mapped until they have no name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, SharedFile] = {}  # by identity

    def take(self, name: str, num_bytes: int) -> SharedFile:
        """Raises FileNotFoundError, or BiremeError when it is too small."""
        file = SharedFile.open(name, num_bytes)
        with self._lock:
            known = self._files.pop(file.identity, None)
        if known is None:
            return file
        known.num_bytes = file.num_bytes
        file.close()
        return known

    def give(self, file: SharedFile) -> None:
        with self._lock:
            self._files[file.identity] = file

    def tidy(self) -> None:
        with self._lock:
            for identity in [identity for identity, file in self._files.items() if not file.has_name]:
                self._files.pop(identity).close()

    def close(self) -> None:
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()
