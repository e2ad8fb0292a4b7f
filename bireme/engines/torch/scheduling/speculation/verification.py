"""Draws the tokens of a step and delivers them; where a draft turns out right its sequence goes on at the next row."""

from __future__ import annotations

from collections.abc import Callable

from bireme.engines.torch.scheduling.delivery import TokenDelivery
from bireme.engines.torch.scheduling.speculation.drafter import drafting_of
from bireme.engines.torch.scheduling.speculation.speculation import Speculation
from bireme.engines.torch.step import SchedulerOutput, Sequence, SequenceStatus
from bireme.logits.sampler import Sampled

Draw = Callable[[list[Sequence], list[int]], Sampled]  # tokens of sequences, each from a row of the step's logits


def deliver_verified(
    plan: SchedulerOutput,
    sequences: list[Sequence],
    sampled: Sampled,
    now: float,
    draw: Draw,
    delivery: TokenDelivery,
    speculation: Speculation,
    advance: Callable[[Sequence], None],
) -> int:
    """Deliver a step with drafts, of which each sequence's first token has been drawn; return how many there were.

    `sequences`: of the first rows of the step's logits. `advance`: the KV of a sequence's next token is in the pools.
    """
    going, depth, total = list(plan.drafts), 0, 0
    accepted, rows = dict.fromkeys(plan.drafts, 0), _rows_of(plan, len(sequences))
    for one in going:
        drafting_of(one).num_drafted += len(plan.drafts[one])
    while True:
        going = _right(plan, going, depth, dict(zip(sequences, sampled.tokens, strict=False)), accepted)
        delivery.accept_all(sequences, sampled, now)
        total += len(sequences)
        sequences = going = [one for one in going if one.state is SequenceStatus.RUNNING]
        if not going:
            break
        for one in going:
            advance(one)
        sampled = draw(going, [rows[one] + depth for one in going])
        depth += 1
    speculation.count(sum(map(len, plan.drafts.values())), accepted.values())
    for one, count in accepted.items():
        speculation.verified(one, len(plan.drafts[one]), count, one.state is not SequenceStatus.RUNNING)
    return total


def _rows_of(plan: SchedulerOutput, begin: int) -> dict[Sequence, int]:
    """Return where in the step's logits the rows of each draft begin."""
    rows = {}
    for one, ids in plan.drafts.items():
        rows[one] = begin
        begin += len(ids)
    return rows


def _right(
    plan: SchedulerOutput, going: list[Sequence], depth: int, drawn: dict[Sequence, int], accepted: dict[Sequence, int]
) -> list[Sequence]:
    """Return those whose drafts say at this depth what was drawn, and count what of it is delivered."""
    right = []
    for one in going:
        ids, drafting = plan.drafts[one], drafting_of(one)
        if depth >= len(ids) or one.state is not SequenceStatus.RUNNING:
            continue
        verdict = drafting.num_right
        if drawn[one] == ids[depth] if verdict is None else depth < verdict:
            right.append(one)
            if drawn[one] not in one.stop_ids:
                accepted[one] += 1
                drafting.num_accepted += 1
    return right
