"""The requests' deadlines. Most requests end earlier: their entries are swept, so that the heap stays small."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from bireme.engines.torch.step import Sequence, SequenceStatus

_SWEEP = 1024  # entries; beyond, the finished ones are dropped each time the heap has doubled


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence, str, bool]] = []
        self._num_added = 0  # breaks ties
        self._sweep_at = _SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, at: float, sequence: Sequence, text: str, is_of_queue: bool = False) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (at, self._num_added, sequence, text, is_of_queue))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[2].state is not SequenceStatus.FINISHED]
            heapq.heapify(self._heap)
            self._sweep_at = max(_SWEEP, 2 * len(self._heap))

    def take(self, now: float) -> Iterator[tuple[Sequence, str, bool]]:
        """Remove and yield what is due: request, error text, whether only its time in the queue is over."""
        while self._heap and self._heap[0][0] <= now:
            _, _, sequence, text, is_of_queue = heapq.heappop(self._heap)
            yield sequence, text, is_of_queue
