"""Pools of rows that other processes map: a host's, a GPU's, and a stand-in for that whose copies are waited for."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bireme.errors import UnavailableError
from bireme.kv.transfer.base import KvLayout
from bireme.kv.transfer.host_pool import HostPool
from bireme.kv.transfer.mapped_host_pool import MappedHostPool
from bireme.kv.transfer.memory import HostMemory, MemoryKind, Region
from bireme.kv.transfer.wire import SharedMemory, SharedRegion

NUM_ROWS = 1 << 15
SIZE = 16  # tokens a block


class _Pool:
    """Rows are taken in blocks, out of their order, and never given back: who reads freed ones finds FREED."""

    FREED = 254

    def __init__(self) -> None:
        self._blocks = itertools.cycle(np.random.default_rng(0).permutation(NUM_ROWS // SIZE).tolist())

    def take(self, num_tokens: int) -> np.ndarray:
        blocks = np.array(list(itertools.islice(self._blocks, -(-num_tokens // SIZE))))
        return (blocks[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[:num_tokens]


class FilePool(_Pool):
    """One tensor a group."""

    def __init__(self, folder: Path, layout: KvLayout) -> None:
        super().__init__()
        folder.mkdir(exist_ok=True)
        self._paths = [folder / str(group) for group in range(len(layout.groups))]
        shapes = [(NUM_ROWS, group.bytes_per_token) for group in layout.groups]
        self.arrays = [
            np.memmap(path, np.uint8, "w+", shape=shape) for path, shape in zip(self._paths, shapes, strict=True)
        ]
        self.regions = tuple((Region(0, shape[1], shape[0], MemoryKind.VRAM),) for shape in shapes)
        self.copy_delay_s, self.began = 0.0, threading.Event()
        self.reaches_others = True
        self.num_mapped = self.num_open = 0

    def put(self, group: int, rows: np.ndarray, data: np.ndarray | int) -> None:
        self.arrays[group][rows] = data

    def get(self, group: int, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.arrays[group][rows])

    def read(self, group: int, rows: np.ndarray, ready: Any = None) -> memoryview:
        return HostMemory([[array] for array in self.arrays]).read(group, rows)

    def room(self, group: int, num_rows: int) -> memoryview:
        return memoryview(bytearray(num_rows * self.arrays[group].shape[1]))

    def write(self, group: int, rows: np.ndarray, data: memoryview, ready: Any = None) -> None:
        HostMemory([[array] for array in self.arrays]).write(group, rows, data)

    def shared(self) -> SharedMemory:
        regions = tuple((SharedRegion(group, 0, array.shape[1], NUM_ROWS),) for group, array in enumerate(self.arrays))
        paths = tuple(str(path).encode() for path in self._paths)
        return SharedMemory(1, paths, (0,) * len(paths), tuple(array.nbytes for array in self.arrays), regions)

    def wait(self, ready: Any) -> None: ...

    def map(self, shared: SharedMemory) -> _MappedFiles:
        if not self.reaches_others:
            raise UnavailableError("no peer access")
        self.num_mapped += 1
        return _MappedFiles(self, shared)


class _MappedFiles:
    def __init__(self, pool: FilePool, shared: SharedMemory) -> None:
        self._pool, self._started = pool, list[Any]()
        self._arrays = [
            np.memmap(handle.decode(), np.uint8, "r", shape=(region.num_rows, region.row_bytes))
            for handle, (region,) in zip(shared.handles, shared.regions, strict=True)
        ]
        pool.num_open += 1

    def copy(self, group: int, source: np.ndarray, target: np.ndarray, ready: Any) -> None:
        if not self._arrays:
            raise UnavailableError("the process is gone")
        self._started.append((group, source, target))

    def wait(self) -> None:
        for group, source, target in self._started:
            self._pool.began.set()
            time.sleep(self._pool.copy_delay_s)
            self._pool.arrays[group][target] = self._arrays[group][source]
        self._started.clear()

    def close(self) -> None:
        self.wait()
        self._arrays = []
        self._pool.num_open -= 1


class StagedPool(_Pool):
    """A stand-in for a GPU's pools whose rows pass through host memory, one tensor a group; a copy ends when it is
    waited for, or at the second look."""

    def __init__(self, layout: KvLayout) -> None:
        super().__init__()
        self.arrays = [[np.zeros((NUM_ROWS, group.bytes_per_token), np.uint8)] for group in layout.groups]
        self._memory = HostMemory(self.arrays)
        self.regions = tuple(
            tuple(replace(region, kind=MemoryKind.VRAM) for region in group) for group in self._memory.regions
        )
        self.copy_delay_s, self.began = 0.0, threading.Event()
        self.num_locked, self.num_begun = 0, 0
        self._begun: deque[_BegunCopy] = deque()
        self._lock = threading.Lock()

    def put(self, group: int, rows: np.ndarray, data: np.ndarray | int) -> None:
        self.arrays[group][0][rows] = data

    def get(self, group: int, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.arrays[group][0][rows])

    def wait(self, ready: Any) -> None: ...

    def read(self, group: int, rows: np.ndarray, ready: Any = None) -> memoryview:
        return self._memory.read(group, rows)

    def room(self, group: int, num_rows: int) -> memoryview:
        return self._memory.room(group, num_rows)

    def write(self, group: int, rows: np.ndarray, data: memoryview, ready: Any = None) -> None:
        self._memory.write(group, rows, data)

    def page_lock(self, memory: np.ndarray) -> None:
        self.num_locked += 1

    def page_unlock(self, memory: np.ndarray) -> None:
        self.num_locked -= 1

    def begin_read(self, group: int, rows: np.ndarray, target: np.ndarray, ready: Any) -> _BegunCopy:
        def copy() -> None:
            target[:] = np.frombuffer(self.read(group, rows), np.uint8)

        return self._begin(copy)

    def begin_write(self, group: int, rows: np.ndarray, source: np.ndarray, ready: Any) -> _BegunCopy:
        return self._begin(lambda: self.write(group, rows, memoryview(source)))

    def _begin(self, copy: Callable[[], None]) -> _BegunCopy:
        self.began.set()
        self.num_begun += 1
        begun = _BegunCopy(self, copy)
        self._begun.append(begun)
        return begun

    def end(self, last: _BegunCopy) -> None:
        """Copy what was begun, in its order, up to one."""
        with self._lock:
            while not last.has_ended:
                first = self._begun.popleft()
                time.sleep(self.copy_delay_s)
                first.copy()
                first.has_ended = True


class _BegunCopy:
    def __init__(self, pool: StagedPool, copy: Callable[[], None]) -> None:
        self._pool, self.copy = pool, copy
        self.has_ended, self._num_looks = False, 0

    def is_done(self) -> bool:
        self._num_looks += 1
        if self._num_looks > 1:
            self.wait()
        return self.has_ended

    def wait(self) -> None:
        self._pool.end(self)


class SharedPool(_Pool, HostPool):
    """A CPU engine's, one tensor a group."""

    def __init__(self, layout: KvLayout) -> None:
        _Pool.__init__(self)
        HostPool.__init__(self, [[(NUM_ROWS, group.bytes_per_token)] for group in layout.groups])
        self.copy_delay_s, self.began = 0.0, threading.Event()
        self.reaches_others = True
        self.num_mapped = self.num_open = 0

    def put(self, group: int, rows: np.ndarray, data: np.ndarray | int) -> None:
        self.arrays[group][0][rows] = data

    def get(self, group: int, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.arrays[group][0][rows])

    def map(self, shared: SharedMemory) -> _SlowlyMapped:
        if not self.reaches_others:
            raise UnavailableError("no peer access")
        self.num_mapped += 1
        return _SlowlyMapped(self, shared)


class _SlowlyMapped(MappedHostPool):
    def __init__(self, pool: SharedPool, shared: SharedMemory) -> None:
        super().__init__(pool.regions, shared)
        self._pool = pool
        pool.num_open += 1

    def copy(self, group: int, source: np.ndarray, target: np.ndarray, ready: Any) -> None:
        self._pool.began.set()
        time.sleep(self._pool.copy_delay_s)
        super().copy(group, source, target, ready)

    def close(self) -> None:
        super().close()
        self._pool.num_open -= 1


class CudaPool(_Pool):
    """An engine's pools on the GPU; the layout is kv_side.LAYOUT."""

    copy_delay_s = 0.0

    def __init__(self) -> None:
        import torch

        from bireme.engines.torch.geometry import LayerGeometry, group_layers
        from bireme.engines.torch.pools.kv_store import KvStore
        from bireme.engines.torch.pools.row_copies import RowCopies

        super().__init__()
        self._lock = threading.Lock()  # the copier puts FREED into rows
        shapes: Sequence[tuple[int, int]] = [(8, 0), (8, 0), (4, 16)]
        geometry = [LayerGeometry(1, size, size, window, torch.float32, ()) for size, window in shapes]
        blocks = NUM_ROWS // SIZE
        self.store = KvStore(geometry, group_layers(geometry), [blocks, blocks], SIZE, torch.device("cuda", 0))
        # The store's own are the copier's alone: they have one room on the GPU.
        self._copies = RowCopies(self.store._moved_tensors, self.store.device)
        for group in range(2):
            self.put(group, np.arange(NUM_ROWS), 255)

    def put(self, group: int, rows: np.ndarray, data: np.ndarray | int) -> None:
        widths = [region.row_bytes for region in self.store.regions[group]]
        whole = np.empty((len(rows), sum(widths)), np.uint8)
        whole[:] = data
        parts = np.split(whole, np.cumsum(widths)[:-1], axis=1)
        data = memoryview(np.concatenate([part.reshape(-1) for part in parts]))  # type: ignore[arg-type]
        with self._lock:
            self._copies.write(group, rows, data, None)  # type: ignore[arg-type]

    def get(self, group: int, rows: np.ndarray) -> np.ndarray:
        widths = [region.row_bytes for region in self.store.regions[group]]
        with self._lock:
            data = np.frombuffer(self._copies.read(group, rows, None), np.uint8).copy()
        parts = np.split(data, np.cumsum(widths)[:-1] * len(rows))
        return np.concatenate([part.reshape(len(rows), -1) for part in parts], axis=1)
