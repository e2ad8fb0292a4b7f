"""What workers hold, for a router: the index, and who of the workers tells of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from bireme.config import ROUTED_STAGES, RouterConfig
from bireme.discovery.run import WorkerRecord
from bireme.kv.index import KvIndex, rank_name
from bireme.kv.placement import Floats, Hashes


class IndexHoldings:
    """Thread-safe. A worker without KV events is taken to hold what it was sent, for `approximate_ttl_s`."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._index = KvIndex()
        self._lock = threading.Lock()

    def follow(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Take the whole present view; those that are missing are forgotten."""
        names = {
            rank_name(name, rank)
            for name, record in workers.items()
            if record.stage in ROUTED_STAGES
            for rank in range(record.capacity.attention_dp_size if record.capacity else 1)
        }
        with self._lock:
            for name, slot in list(self._index.slots.items()):
                if name not in names:
                    self._index.remove_worker(slot)
            for name in sorted(names - self._index.slots.keys()):
                self._index.add_worker(name)

    def match(self, hashes: Hashes, targets: Sequence[tuple[str, int]]) -> tuple[Floats, Floats]:
        with self._lock:
            depths = self._index.match(hashes).astype(float)
            slots = self._index.slots
            columns = np.array([slots.get(rank_name(*target), -1) for target in targets], int)
        is_known = columns >= 0
        return depths[0, columns] * is_known, depths[-1, columns] * is_known

    def predict(self, target: tuple[str, int], hashes: Hashes) -> None:
        with self._lock:
            if (slot := self._index.slots.get(rank_name(*target))) is not None:
                self._index.predicted(slot, hashes, self._config.approximate_ttl_s)

    def close(self) -> None:
        pass
