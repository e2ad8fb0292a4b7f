"""An LRU cache of pictures' embeddings, bounded by bytes.

Owned by one event loop. A value larger than the whole capacity is not kept; a capacity of 0 keeps nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from bireme.metrics import Registry


class Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


_V = TypeVar("_V", bound=Sized)


class EmbeddingCache(Generic[_V]):
    def __init__(self, capacity_bytes: int, metrics: Registry) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._metrics = metrics
        self._entries: OrderedDict[str, _V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> _V | None:
        """Return the value and make it the most recently used; counts no hit."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: str, value: _V) -> None:
        """Keep a value in place of what the key had; evicts until there is room."""
        self._drop(key)
        if value.num_bytes <= self.capacity_bytes:
            while self.used_bytes + value.num_bytes > self.capacity_bytes:
                self._drop(next(iter(self._entries)))
                self._metrics.add("bireme_embedding_cache_evictions_total")
            self._entries[key] = value
            self.used_bytes += value.num_bytes
        self.publish()

    def publish(self) -> None:
        self._metrics.set("bireme_embedding_cache_bytes", self.used_bytes)
        self._metrics.set("bireme_embedding_cache_entries", len(self._entries))

    def _drop(self, key: str) -> None:
        value = self._entries.pop(key, None)
        if value is not None:
            self.used_bytes -= value.num_bytes
