"""One side of a KV transfer with rows that check themselves, in this process or in a child of its own.

As a program it reads one JSON call a line and answers each with one line: `Child` is its other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bireme.config import CHECKOUT, CacheTransceiverConfig
from bireme.disagg import DisaggregatedParams
from bireme.discovery import run_folder
from bireme.discovery.records import WorkerRecord, host_id
from bireme.kv.transfer.backend import Backend
from bireme.kv.transfer.base import Find, GroupLayout, KvLayout
from bireme.kv.transfer.leased import LeasedTransfer
from bireme.kv.transfer.mapped import MappedBackend
from bireme.kv.transfer.memory import HostMemory, MemoryKind, TokenRows
from bireme.kv.transfer.nixl import NixlBackend
from bireme.kv.transfer.shm import ShmBackend
from bireme.kv.transfer.shm_file import SHM_DIR, file_prefix
from bireme.kv.wire.curve import needs_curve
from bireme.metrics import Registry

LAYOUT = KvLayout("tiny", "float32", (GroupLayout(0, (64, 64)), GroupLayout(16, (32,))))
DEPLOYMENT_KEY = b"k" * 32
NIXL = ("nixl", "staged", "vram", "staged_vram")
CHUNK_BYTES = 1024  # 8 tokens of the first group


def expected_rows(group: int, first: int, last: int, row_bytes: int) -> np.ndarray:
    """Return bytes (last - first, row_bytes) that no other position has."""
    tokens = np.arange(first, last).reshape(-1, 1)
    return ((tokens * 31 + group * 101 + np.arange(row_bytes) * 7) % 251).astype(np.uint8)


def arrays_of(layout: KvLayout, num_tokens: int) -> list[list[np.ndarray]]:
    """Return memory for rows, one tensor a group; 255 is in no expected row."""
    return [[np.full((num_tokens, group.bytes_per_token), 255, np.uint8)] for group in layout.groups]


class SlowMemory:
    """Rows that only their owner can copy, as those of a GPU, and slowly."""

    def __init__(self, layout: KvLayout, num_tokens: int, delay_s: float) -> None:
        self._arrays, self._delay_s = HostMemory(arrays_of(layout, num_tokens)), delay_s
        self.began = threading.Event()
        self.regions = tuple(
            tuple(replace(region, kind=MemoryKind.VRAM) for region in group) for group in self._arrays.regions
        )

    def token_rows(self) -> TokenRows:
        return TokenRows(self, self._arrays.token_rows().rows)

    def read(self, group: int, rows: np.ndarray, ready: Any = None) -> memoryview:
        self.began.set()
        data = self._arrays.read(group, rows)
        time.sleep(self._delay_s)
        return data

    def wait(self, ready: Any) -> None: ...

    def room(self, group: int, num_rows: int) -> memoryview:
        return self._arrays.room(group, num_rows)

    def write(self, group: int, rows: np.ndarray, data: memoryview, ready: Any = None) -> None:
        self.began.set()
        self._arrays.write(group, rows, data)
        time.sleep(self._delay_s)


class Fetching:
    """What one fetch did."""

    def __init__(self, layout: KvLayout, num_tokens: int, write_delay_s: float) -> None:
        self._arrays = arrays_of(layout, num_tokens)
        host = HostMemory(self._arrays)
        slow = SlowMemory(layout, num_tokens, write_delay_s)
        slow._arrays = host
        self.memory: Any = slow if write_delay_s else host
        self.began_writing = slow.began
        self.num_done = 0
        self.errors: list[Any] = []
        self.ended = threading.Event()
        self.handle: Any = None

    @property
    def arrays(self) -> list[list[np.ndarray]]:
        return self._arrays

    @property
    def rows(self) -> TokenRows:
        found: TokenRows = self.memory.token_rows()
        return found

    @property
    def is_right(self) -> bool:
        """Whether every row is what was exported, or untouched."""
        return all(
            bool(((array == expected_rows(group, 0, len(array), array.shape[1])) | (array == 255)).all())
            for group, (array,) in enumerate(self.arrays)
        )

    @property
    def has_written(self) -> bool:
        return any(bool((array != 255).any()) for (array,) in self.arrays)

    def done(self, error: Any) -> None:
        self.num_done += 1
        self.errors.append(error)
        self.ended.set()

    def result(self, timeout_s: float = 60.0) -> Any:
        """Return the error given to `done`, or None."""
        assert self.ended.wait(timeout_s), "done was not called"
        return self.errors[0]

    def tokens_written(self, group: int) -> list[int]:
        return np.flatnonzero((self.arrays[group][0] != 255).all(axis=1)).tolist()


class PoolFetching(Fetching):
    """A fetch into rows of a pool."""

    def __init__(self, layout: KvLayout, num_tokens: int, pool: Any) -> None:
        super().__init__(layout, 0, 0.0)
        self._pool, self._rows = pool, [pool.take(num_tokens) for _ in layout.groups]
        self.began_writing = getattr(pool, "began", self.began_writing)
        for group, rows in enumerate(self._rows):
            pool.put(group, rows, 255)

    @property
    def arrays(self) -> list[list[np.ndarray]]:
        return [[self._pool.get(group, rows)] for group, rows in enumerate(self._rows)]

    @property
    def rows(self) -> TokenRows:
        return TokenRows(memory_of(self._pool), tuple(self._rows))


def memory_of(pool: Any) -> Any:
    return getattr(pool, "store", pool)


def pool_of(backend: str, folder: Path, layout: KvLayout) -> Any:
    """Return a pool of rows that others map, or None."""
    from tests.kv.transfer import shared_pools  # with numba, whose import takes most of a child's start

    if backend == "cuda_ipc":
        return shared_pools.FilePool(folder, layout)
    if backend == "mapped":
        return shared_pools.SharedPool(layout)
    if backend == "staged":
        return shared_pools.StagedPool(layout)
    return shared_pools.CudaPool() if backend in ("cuda", "vram", "staged_vram") else None


def backend_of(name: str, run_dir: Path, worker: str, life: int, host: str = "") -> Backend:
    """`cuda` is cuda_ipc with a GPU's memory in place of the stand-in's.

    `staged` is nixl through host memory, with a stand-in for a GPU's memory, and `staged_vram` with one; `vram` is nixl
    out of that itself.
    `shm` is without a pool that others map, and so through files; `mapped` is shm with one.
    """
    if name in NIXL:
        between_hosts = bool(host) and needs_curve(f"tcp://{host}:0")
        return NixlBackend(worker, between_hosts=between_hosts, staging="never" if name == "vram" else "auto")
    shm = ShmBackend(run_dir, worker, life)
    return MappedBackend(MemoryKind.VRAM if name in ("cuda_ipc", "cuda") else MemoryKind.DRAM, shm)


class Side:
    def __init__(
        self,
        run_dir: Path,
        worker: str,
        *,
        life: int = 1,
        layout: KvLayout = LAYOUT,
        timeout_ms: int = 60_000,
        max_tokens: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        find: Find | None = None,
        backend: str = "shm",
        has_pool: bool = True,
        host: str = "",
    ) -> None:
        self.run_dir, self.worker, self.life, self.layout = run_dir, worker, life, layout
        self.metrics = Registry(worker)
        self.num_released = 0
        self._leased: dict[int, list[Any]] = {}
        self.began_reading = threading.Event()
        config = CacheTransceiverConfig(
            backend="DEFAULT", kv_transfer_timeout_ms=timeout_ms, max_tokens_in_buffer=max_tokens
        )
        has_pool = has_pool and backend != "shm"
        self.pool = pool_of(backend, run_dir / f"pool-{worker}-{life}", layout) if has_pool else None
        self.transfer = LeasedTransfer(
            backend_of(backend, run_dir, worker, life, host),
            run_dir=run_dir, worker=worker, life=life, config=config, metrics=self.metrics, chunk_bytes=chunk_bytes,
            find=find, host=host, deployment_key=DEPLOYMENT_KEY,
        )  # fmt: skip
        self.transfer.start(layout, self.pool and memory_of(self.pool))
        run_folder.publish(run_dir, self.record())

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker=self.worker,
            life=self.life,
            pid=os.getpid(),
            host=host_id(),
            transfer_endpoint=self.transfer.endpoint,
        )

    def reserve(self) -> Any:
        leased: list[Any] = []  # the rows of each group, once they are exported
        lease = self.transfer.reserve(lambda: self._release(leased))
        self._leased[lease.lease_id] = leased
        return lease

    def _release(self, leased: list[Any]) -> None:
        for group, rows in enumerate(leased):  # another request has them now
            self.pool.put(group, rows, self.pool.FREED)
        self.num_released += 1

    def export(self, num_tokens: int, read_delay_s: float = 0.0) -> DisaggregatedParams:
        return self.export_lease(self.reserve(), num_tokens, read_delay_s)

    def export_lease(self, lease: Any, num_tokens: int, read_delay_s: float = 0.0) -> DisaggregatedParams:
        if self.pool is not None:
            return self._export_rows(lease, num_tokens)
        slow = SlowMemory(self.layout, num_tokens, read_delay_s)
        slow.began = self.began_reading
        for group, (array,) in enumerate(slow._arrays.arrays):
            array[:] = expected_rows(group, 0, num_tokens, array.shape[1])
        lease.export(num_tokens, slow.token_rows() if read_delay_s else slow._arrays.token_rows())
        return self._params(lease, num_tokens)

    def _export_rows(self, lease: Any, num_tokens: int) -> DisaggregatedParams:
        rows = [self.pool.take(num_tokens) for _ in self.layout.groups]
        for group, layout in enumerate(self.layout.groups):
            self.pool.put(group, rows[group], expected_rows(group, 0, num_tokens, layout.bytes_per_token))
        self._leased[lease.lease_id] += rows
        lease.export(num_tokens, TokenRows(memory_of(self.pool), tuple(rows)))
        return self._params(lease, num_tokens)

    def _params(self, lease: Any, num_tokens: int) -> DisaggregatedParams:
        ids = {"lease_id": lease.lease_id, "generation": lease.generation}
        return DisaggregatedParams(worker=self.worker, life=self.life, num_tokens=num_tokens, **ids)

    def fetch(
        self, params: DisaggregatedParams, firsts: tuple[int, ...] = (0, 0), write_delay_s: float = 0.0
    ) -> Fetching:
        if self.pool is None:
            fetching = Fetching(self.layout, params.num_tokens, write_delay_s)
        else:
            fetching = PoolFetching(self.layout, params.num_tokens, self.pool)
            self.pool.copy_delay_s = write_delay_s
        fetching.handle = self.transfer.fetch(params, firsts, fetching.rows, fetching.done)
        return fetching

    def room_in_use(self) -> int:
        """Return the bytes to which exporters may be writing, and those that are sent: 0 after all transfers."""
        backend: Any = self.transfer._backend
        areas = [area for name in ("_staging", "_ring") if (area := getattr(backend, name, None)) is not None]
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not any(area.used_bytes for area in areas))
        return sum(area.used_bytes for area in areas)

    def lease_counts(self) -> dict[str, int]:
        return {state.value: count for state, count in self.transfer._table.counts().items() if count}

    def counters(self) -> dict[str, float]:
        """Return counters and gauges by name and labels without the worker, e.g. `..._failures_total timeout`."""
        delta = self.metrics.take_delta()
        return {" ".join((name, *labels[1:])): value for name, labels, value in delta.counters + delta.gauges}

    def close(self) -> None:
        self.transfer.close()


def wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def files_of(run_dir: Path, worker: str) -> list[str]:
    """Return the names of a worker's files that a transfer has; not of those kept for the next."""
    return [name for name in all_files_of(run_dir, worker) if "-spare-" not in name]


def all_files_of(run_dir: Path, worker: str) -> list[str]:
    prefix = file_prefix(run_dir, worker)
    return [path.name for path in SHM_DIR.iterdir() if path.name.startswith(prefix)]


class Child:
    """A Side in a process of its own, to be killed or stopped."""

    def __init__(self, run_dir: Path, worker: str, command: Sequence[str] = (), **options: Any) -> None:
        """`command`: what runs the program, e.g. in another network namespace."""
        self.process = subprocess.Popen(
            [*command, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        )
        self.worker = worker
        self.call("start", run_dir=str(run_dir), worker=worker, **options)

    def call(self, method: str, **arguments: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def export(self, num_tokens: int, read_delay_s: float = 0.0) -> DisaggregatedParams:
        return DisaggregatedParams(**self.call("export", num_tokens=num_tokens, read_delay_s=read_delay_s))

    def fetch(self, params: DisaggregatedParams, write_delay_s: float = 0.0) -> None:
        fields = {name: getattr(params, name) for name in ("worker", "life", "lease_id", "generation", "num_tokens")}
        self.call("fetch", params=fields, write_delay_s=write_delay_s)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; it stays a zombie until `reap`, as under a supervisor that is slow."""
        self.process.kill()

    def reap(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()


class Calls:
    """The program's side of Child.call."""

    def start(self, run_dir: str, worker: str, **options: Any) -> None:
        self._side = Side(Path(run_dir), worker, **options)

    def export(self, num_tokens: int, read_delay_s: float) -> dict[str, Any]:
        self._lease = self._side.reserve()
        params = self._side.export_lease(self._lease, num_tokens, read_delay_s)
        return {name: getattr(params, name) for name in ("worker", "life", "lease_id", "generation", "num_tokens")}

    def fetch(self, params: dict[str, Any], write_delay_s: float) -> None:
        self._fetching = self._side.fetch(DisaggregatedParams(**params), write_delay_s=write_delay_s)

    def wait_writing(self) -> bool:
        return self._fetching.began_writing.wait(60)

    def wait_reading(self) -> bool:
        return self._side.began_reading.wait(60)

    def result(self) -> list[Any]:
        error = self._fetching.result(60)
        return [type(error).__name__ if error else None, self._fetching.is_right]

    def open_maps(self) -> int:
        return int(self._side.pool.num_open)

    def abort(self) -> bool:
        """End the lease that was exported last; wait until its rows are no longer read."""
        before = self._side.num_released
        self._lease.abort()
        wait_until(lambda: self._side.num_released > before)
        return True

    def is_free(self) -> bool:
        """Wait until no lease is held and no exporter may be writing here."""
        wait_until(lambda: not self._side.lease_counts(), 60)
        return not self._side.room_in_use()

    def close(self) -> None:
        self._side.close()


def main() -> None:
    calls, answers = Calls(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX logs to standard output
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(calls, method)(**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
