"""What one router has sent to a worker and what runs there still: blocks in use, prompts not computed yet, requests."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_MEMORY_S = 10.0  # what was measured so long ago, in time spent on prompts, counts a third


@dataclass(slots=True, eq=False)
class SentRequest:
    """One request's part of a worker's load, until `ActiveRequests.free`."""

    used: Sequence[int]  # hashes of the prompt's full blocks, from its start; empty: they are not counted
    prefill_tokens: int  # that the worker must compute
    computed: Sequence[int] = ()  # hashes of the full blocks that it computes
    prompt_tokens: int = 0  # all of them, if it computes any
    is_over: bool = False


class ActiveRequests:
    """Used on one loop.

    A block that several requests share counts once. Prompts are computed in the order in which they were sent, at a
    rate that is measured where they end: between two ends that predicts how much is left.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.prefill_tokens = 0  # sent, and not known to be computed
        self.prompt_tokens = 0  # of these prompts: an engine counts so many until it finds what it has cached
        self._computed_tokens = self._computing_s = 0.0  # whose quotient is the rate
        self._blocks: Counter[int] = Counter()
        self._computing: Counter[int] = Counter()
        self._waiting: OrderedDict[int, SentRequest] = OrderedDict()  # to be computed, by id
        self.began_at = 0.0  # when the first of them got the worker

    @property
    def rate(self) -> float:
        """Prompt tokens a second; 0: not known yet."""
        return self._computed_tokens / self._computing_s if self._computing_s else 0.0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def shared(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's blocks are in use already: prefixes are, if their ends are."""
        if not hashes or hashes[0] not in self._blocks:
            return 0
        low, high = 1, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def computing(self, hashes: Sequence[int], num_held: int) -> int:
        """Return how many of the last of a prompt's first `num_held` blocks are only being computed."""
        if not self._computing or not num_held or hashes[num_held - 1] not in self._computing:
            return 0
        low, high = 0, num_held - 1
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in self._computing:
                high = middle
            else:
                low = middle + 1
        return num_held - low

    def add(self, request: SentRequest, now: float) -> None:
        self.num_requests += 1
        self._blocks.update(request.used)
        if request.prefill_tokens:
            if not self._waiting:
                self.began_at = now
            self._waiting[id(request)] = request
            self._computing.update(request.computed)
            self.prefill_tokens += request.prefill_tokens
            self.prompt_tokens += request.prompt_tokens

    def prefilled(self, request: SentRequest, now: float) -> None:
        """The prompt has been computed; harmless when that is known."""
        if not self._stop_waiting(request):
            return
        # Prompts of one step end together: their rate is that of all of them, not of each.
        elapsed_s, self.began_at = now - self.began_at, now
        kept = math.exp(-elapsed_s / _MEMORY_S)
        self._computed_tokens = kept * self._computed_tokens + request.prefill_tokens
        self._computing_s = kept * self._computing_s + elapsed_s

    def free(self, request: SentRequest) -> None:
        """The request has ended, computed or not; harmless when that is known."""
        if request.is_over:
            return
        request.is_over = True
        self._stop_waiting(request)
        self.num_requests -= 1
        _subtract(self._blocks, request.used)

    @property
    def first_tokens(self) -> int:
        """Tokens of the prompt that is being computed."""
        return next(iter(self._waiting.values())).prefill_tokens if self._waiting else 0

    def prefill_left(self, now: float) -> float:
        """Return the prompt tokens that are still to be computed; at the most one prompt fewer than is known."""
        return self.prefill_tokens - min(self.first_tokens, self.rate * (now - self.began_at))

    def _stop_waiting(self, request: SentRequest) -> bool:
        if self._waiting.pop(id(request), None) is None:
            return False
        self.prefill_tokens -= request.prefill_tokens
        self.prompt_tokens -= request.prompt_tokens
        _subtract(self._computing, request.computed)
        return True


def _subtract(counts: Counter[int], items: Sequence[int]) -> None:
    for item in items:
        if counts[item] == 1:
            del counts[item]
        else:
            counts[item] -= 1
