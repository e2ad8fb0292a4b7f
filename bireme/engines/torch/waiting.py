"""The queue of waiting requests: by priority, first come first served within one."""

from __future__ import annotations

import heapq

from bireme.engines.torch.sequence import Sequence


class WaitingQueue:
    """A heap by `Sequence.rank`; removed entries are skipped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self.num_tokens = 0  # that members are to compute, unless they are found in the prefix cache
        self._num_pushed = 0  # breaks ties: a preempted sequence comes back with the rank that it had
        self._members: dict[int, Sequence] = {}  # by number

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        self.num_tokens += _num_to_compute(sequence)
        self._members[sequence.number] = sequence
        self._num_pushed += 1
        heapq.heappush(self._heap, (sequence.rank, self._num_pushed, sequence))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][2].number not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        if self._members.pop(sequence.number, None) is not None:
            self.num_tokens -= _num_to_compute(sequence)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [(member.rank, at, member) for at, member in enumerate(self._members.values())]
            heapq.heapify(self._heap)


def _num_to_compute(sequence: Sequence) -> int:
    """Return the same while it waits; 0: its KV comes from prefill."""
    is_import = sequence.params is not None and not sequence.is_sampling
    return 0 if is_import else len(sequence.tokens)
