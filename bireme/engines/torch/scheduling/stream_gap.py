"""How many tokens of a prompt a step takes beside running streams, so that it ends within scheduler_config's bound."""

from __future__ import annotations

from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.engines.torch.step import SchedulerOutput

LEAST_TOKENS = 64  # that a step takes whatever the bound: a prompt gets to its end
_PIECE = 32  # chunks are multiples of it, but for a prompt's end


class StreamGap:
    def __init__(self, costs: StepCosts, bound_s: float) -> None:
        self._costs, self._bound_s = costs, bound_s

    def most_tokens(self, plan: SchedulerOutput, before: int, count: int) -> int:
        """Return how many of `count` tokens behind `before` may join a step; 0: they wait for the next."""
        if not plan.decodes or not count:
            return count
        work = StepWork.of(plan)
        if self._holds(work.with_chunk(before, count)):
            return count
        least, most = 0, -(-count // _PIECE) - 1  # pieces
        while least < most:
            middle = (least + most + 1) // 2
            if self._holds(work.with_chunk(before, middle * _PIECE)):
                least = middle
            else:
                most = middle - 1
        if least * _PIECE >= LEAST_TOKENS:
            return least * _PIECE
        return 0 if plan.chunks else min(count, LEAST_TOKENS)

    def _holds(self, work: StepWork) -> bool:
        """A step of more than twice the tokens that have been measured is not believed."""
        is_near = work.prefill_tokens <= 2 * self._costs.most_prefill
        return is_near and self._costs.most_s(work) <= self._bound_s
