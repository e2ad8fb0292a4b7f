"""What one router has sent to a worker and what runs there still: blocks in use, prompts not computed yet, requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from bireme.kv.kernels.arrays import Hashes
from bireme.kv.routing.block_uses import BlockUses

NO_BLOCKS: Hashes = np.zeros(0, np.uint64)
_MEMORY_S = 10.0  # what was measured so long ago, in time spent on prompts, counts a third


@dataclass(slots=True, eq=False)
class SentRequest:
    """One request's part of a worker's load, until `ActiveRequests.free`."""

    used: Hashes  # of the prompt's full blocks, from its start; empty: they are not counted
    prefill_tokens: int  # that the worker must compute
    computed: Hashes = field(default_factory=lambda: NO_BLOCKS)  # of the full blocks that it computes
    prompt_tokens: int = 0  # all of them, if it computes any
    num_new: int = 0  # full blocks that the worker does not hold yet: they take others' places
    is_over: bool = False


class ActiveRequests:
    """Used on one loop.

    A block that several requests share counts once. Prompts are computed in the order in which they were sent, at a
    rate that is measured where they end: between two ends that predicts how much is left.
    """

    def __init__(self, uses: BlockUses | None = None) -> None:
        """`uses`: where its blocks are counted, as those of `user` and, while computed, `computing_user`; None: not."""
        self._uses = uses
        self.user, self.computing_user = (uses.new_user(), uses.new_user()) if uses is not None else (0, 0)
        self.num_requests = 0
        self.num_blocks = 0  # in use
        self.prefill_tokens = 0  # sent, and not known to be computed
        self.prompt_tokens = 0  # of these prompts: an engine counts so many until it finds what it has cached
        self._computed_tokens = self._computing_s = 0.0  # whose quotient is the rate
        self._waiting: OrderedDict[int, SentRequest] = OrderedDict()  # to be computed, by id
        self.began_at = 0.0  # when the first of them got the worker

    @property
    def rate(self) -> float:
        """Prompt tokens a second; 0: not known yet."""
        return self._computed_tokens / self._computing_s if self._computing_s else 0.0

    def add(self, request: SentRequest, now: float) -> None:
        self.num_requests += 1
        self.num_blocks += self._count(self.user, request.used)
        if request.prefill_tokens:
            if not self._waiting:
                self.began_at = now
            self._waiting[id(request)] = request
            self._count(self.computing_user, request.computed)
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
        if self._uses is not None and len(request.used):
            self.num_blocks -= self._uses.subtract(self.user, request.used)

    @property
    def first_tokens(self) -> int:
        """Tokens of the prompt that is being computed."""
        return next(iter(self._waiting.values())).prefill_tokens if self._waiting else 0

    def _stop_waiting(self, request: SentRequest) -> bool:
        if self._waiting.pop(id(request), None) is None:
            return False
        self.prefill_tokens -= request.prefill_tokens
        self.prompt_tokens -= request.prompt_tokens
        if self._uses is not None and len(request.computed):
            self._uses.subtract(self.computing_user, request.computed)
        return True

    def _count(self, user: int, blocks: Hashes) -> int:
        return self._uses.add(user, blocks) if self._uses is not None and len(blocks) else 0
