"""What workers hold, for a router: its index, into which a feed of their events writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from bireme.config import ROUTED_STAGES, RouterConfig
from bireme.discovery.records import WorkerRecord
from bireme.kv.following.index import KvIndex, rank_name
from bireme.kv.kernels.arrays import Floats, Hashes, Mask
from bireme.metrics import Registry

_REPORT_S = 1.0
Columns = tuple[npt.NDArray[np.int64], "Mask | None"]  # of workers in the index's rows, and which of them it lacks


class IndexHoldings:
    """Thread-safe: whoever writes into `index` holds `lock`.

    A worker that publishes no events is taken to hold what it was sent, for `approximate_ttl_s`.
    """

    def __init__(self, config: RouterConfig, metrics: Registry) -> None:
        self.index, self.lock = KvIndex(), threading.Lock()
        self._config, self._metrics = config, metrics
        self._has_events: frozenset[str] = frozenset()
        self._reported_at = 0.0
        self._columns: dict[int, tuple[Sequence[tuple[str, int]], int, Columns]] = {}  # by id of a stage's list

    def follow(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Take the whole present view; those that are missing are forgotten."""
        self._has_events = frozenset(name for name, record in workers.items() if record.event_endpoint)
        names = {
            rank_name(name, rank)
            for name, record in workers.items()
            if record.stage in ROUTED_STAGES
            for rank in range(record.capacity.attention_dp_size if record.capacity else 1)
        }
        self._columns.clear()
        with self.lock:
            for name, slot in list(self.index.slots.items()):
                if name not in names:
                    self.index.remove_worker(slot)
            for name in sorted(names - self.index.slots.keys()):
                self.index.add_worker(name)

    def match(self, hashes: Hashes, targets: Sequence[tuple[str, int]]) -> Floats:
        with self.lock:
            depths, (columns, unknown) = self.index.match(hashes), self._columns_of(targets)
            if (now := time.monotonic()) - self._reported_at > _REPORT_S:
                self._reported_at = now
                self._report()
        known: Floats = depths.take(columns, 1).astype(np.float64)
        if unknown is not None:
            known[:, unknown] = 0.0
        return known

    def predict(self, target: tuple[str, int], hashes: Hashes) -> None:
        config = self._config
        ttl_s = config.predicted_ttl_s if target[0] in self._has_events else config.approximate_ttl_s
        with self.lock:
            if len(hashes) and (slot := self.index.slots.get(rank_name(*target))) is not None:
                self.index.predicted(slot, hashes, ttl_s)

    @property
    def problem(self) -> str:
        return ""

    def close(self) -> None: ...

    def _columns_of(self, targets: Sequence[tuple[str, int]]) -> Columns:
        """Return where workers are in the index; their list stays the same object until they change."""
        listed, num_changes, found = self._columns.get(id(targets), (None, -1, None))
        if found is None or listed is not targets or num_changes != self.index.num_slot_changes:
            slots = self.index.slots
            columns = np.array([slots.get(rank_name(*target), -1) for target in targets], np.int64)
            found = columns, columns < 0 if (columns < 0).any() else None
            self._columns[id(targets)] = targets, self.index.num_slot_changes, found
        return found

    def _report(self) -> None:
        self._metrics.set("bireme_router_index_blocks", self.index.num_blocks)
        self._metrics.set("bireme_router_index_memberships", self.index.num_memberships)
        self._metrics.set("bireme_router_index_bytes", self.index.nbytes)
