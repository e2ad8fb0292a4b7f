"""What prompts cost an engine beside what it does, for routers: read from the step costs."""

from __future__ import annotations

from bireme.engines.torch.scheduling.step_costs import StepCosts, StepWork
from bireme.kv.wire.event_wire import PRICED_TOKENS, WorkerPrices

NOTHING = StepWork(0, 0, 0)
_MOST_PARTS = 64  # of a prompt: many small ones cost about what fewer do


def prices_of(
    costs: StepCosts, beside: StepWork, step_tokens: int, transfer_ms: tuple[float, float] | None
) -> WorkerPrices | None:
    """`step_tokens`: the most of a step. None: the engine has not computed a prompt."""
    if not costs.most_prefill:
        return None
    step_s = costs.usual_s(beside)
    added: list[float] = []
    for tokens in PRICED_TOKENS:
        seconds, before, a_part = 0.0, 0, max(step_tokens, tokens // _MOST_PARTS)
        while before < tokens:
            count = min(tokens - before, a_part)
            seconds += max(0.0, costs.usual_s(beside.with_chunk(before, count)) - step_s)
            before += count
        added.append(round(max([1e3 * seconds, *added[-1:]]), 3))  # a longer one never costs less
    start, slope = transfer_ms or (-1.0, 0.0)
    one, two, three, four, five = added
    return WorkerPrices(round(1e3 * step_s, 3), (one, two, three, four, five), costs.most_prefill, start, slope)
