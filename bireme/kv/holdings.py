"""What workers hold, for a router: its index, into which a feed of their events writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from bireme.config import ROUTED_STAGES, RouterConfig
from bireme.discovery.run import WorkerRecord
from bireme.kv.index import KvIndex, rank_name
from bireme.kv.placement import Floats, Hashes
from bireme.metrics import Registry

_REPORT_S = 1.0


class IndexHoldings:
    """Thread-safe: whoever writes into `index` holds `lock`.

    A worker that publishes no events is taken to hold what it was sent, for `approximate_ttl_s`.
    """

    def __init__(self, config: RouterConfig, metrics: Registry) -> None:
        self.index, self.lock = KvIndex(), threading.Lock()
        self._config, self._metrics = config, metrics
        self._has_events: frozenset[str] = frozenset()
        self._reported_at = 0.0
        self._names: dict[int, tuple[Sequence[tuple[str, int]], list[str]]] = {}  # in the index, by id of the list

    def follow(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Take the whole present view; those that are missing are forgotten."""
        self._has_events = frozenset(name for name, record in workers.items() if record.event_endpoint)
        names = {
            rank_name(name, rank)
            for name, record in workers.items()
            if record.stage in ROUTED_STAGES
            for rank in range(record.capacity.attention_dp_size if record.capacity else 1)
        }
        self._names.clear()
        with self.lock:
            for name, slot in list(self.index.slots.items()):
                if name not in names:
                    self.index.remove_worker(slot)
            for name in sorted(names - self.index.slots.keys()):
                self.index.add_worker(name)

    def match(self, hashes: Hashes, targets: Sequence[tuple[str, int]]) -> Floats:
        with self.lock:
            depths = self.index.match(hashes)
            slots = self.index.slots
            listed, names = self._names.get(id(targets), ((), []))
            if listed is not targets:  # the list of a stage's workers stays until they change
                names = [rank_name(*target) for target in targets]
                self._names[id(targets)] = targets, names
            columns = np.array([slots.get(name, -1) for name in names], int)
            if (now := time.monotonic()) - self._reported_at > _REPORT_S:
                self._reported_at = now
                self._report()
        is_known = columns >= 0
        known: Floats = depths[:, columns] * is_known.astype(float)
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

    def _report(self) -> None:
        self._metrics.set("bireme_router_index_blocks", self.index.num_blocks)
        self._metrics.set("bireme_router_index_memberships", self.index.num_memberships)
        self._metrics.set("bireme_router_index_bytes", self.index.nbytes)
