"""The queue of waiting requests: by priority, first come first served within one."""

from __future__ import annotations

import heapq

from bireme.engines.torch.sequence import Sequence


class WaitingQueue:
    """A heap by `Sequence.rank`; removed entries are skipped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self._num_pushed = 0  # breaks ties: a preempted sequence comes back with the rank that it had
        self._members: dict[int, Sequence] = {}  # by number

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        self._members[sequence.number] = sequence
        self._num_pushed += 1
        heapq.heappush(self._heap, (sequence.rank, self._num_pushed, sequence))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][2].number not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        self._members.pop(sequence.number, None)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [(member.rank, at, member) for at, member in enumerate(self._members.values())]
            heapq.heapify(self._heap)
