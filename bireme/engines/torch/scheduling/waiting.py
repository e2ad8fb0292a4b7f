"""The queue of waiting requests: by priority, first come first served within one.

One whose beginning is being copied to the device for another request is passed by until it has arrived.
"""

from __future__ import annotations

import heapq

from bireme.engines.child.step_sums import QueueSums
from bireme.engines.torch.step import Sequence


class WaitingQueue:
    """A heap by `Sequence.rank`; removed entries are skipped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self.num_tokens = 0  # that members are to compute, unless they are found in the prefix cache
        self.sums: QueueSums | None = None  # of the members; None: nobody asks for them
        self._num_pushed = 0  # breaks ties: a preempted sequence comes back with the rank that it had
        self._members: dict[int, Sequence] = {}  # by number
        self._parked: list[Sequence] = []  # members that are not in the heap

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        self.num_tokens += _num_to_compute(sequence)
        if self.sums is not None:
            self.sums.add(len(sequence.tokens), _is_decode(sequence))
        self._members[sequence.number] = sequence
        self._insert(sequence)

    def park(self, sequence: Sequence) -> None:
        """Pass by the head of the queue until `unpark`."""
        assert self.peek() is sequence, "only the head is parked"
        heapq.heappop(self._heap)
        self._parked.append(sequence)

    def unpark(self) -> None:
        """Let all that were parked come up again."""
        parked, self._parked = self._parked, []
        for sequence in parked:
            if sequence.number in self._members:
                self._insert(sequence)

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][2].number not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        if self._members.pop(sequence.number, None) is not None:
            self.num_tokens -= _num_to_compute(sequence)
            if self.sums is not None:
                self.sums.remove(len(sequence.tokens), _is_decode(sequence))
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            parked = {parked.number for parked in self._parked}
            queued = [member for member in self._members.values() if member.number not in parked]
            self._heap = [(member.rank, at, member) for at, member in enumerate(queued)]
            heapq.heapify(self._heap)

    def _insert(self, sequence: Sequence) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (sequence.rank, self._num_pushed, sequence))


def _num_to_compute(sequence: Sequence) -> int:
    """Return the same while it waits; 0: its KV comes from prefill."""
    return 0 if _is_import(sequence) else len(sequence.tokens)


def _is_decode(sequence: Sequence) -> bool:
    """Return the same while it waits: whether it had its first token before it was preempted, or prefill has it."""
    return bool(sequence.first_token_at) or _is_import(sequence)


def _is_import(sequence: Sequence) -> bool:
    return sequence.params is not None and not sequence.is_sampling
